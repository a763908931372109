"""Write llms.txt, a list of the documentation pages that is meant for language models.

Each entry has a link to a page and the first sentence of the page. Run ``python -m docs.llms_txt`` after you
change the first sentence of a page, or the menu in mkdocs.yml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "llms.txt"
_FIRST_PROSE = re.compile(r"^(?!#|```|\||<!--|!\[|- )(\S.*(?:\n\S.*)*)", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=\.)\s")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def llms_txt() -> str:
    """Return the text of llms.txt.

    Returns:
        The project's name and summary, links to AGENTS.md and ARCHITECTURE.md, and a section for each part of
        the menu.
    """
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    parts: dict[str, list[str]] = {
        "Overview": [
            f"- [{title}]({page}): {_summary(ROOT / page)}"
            for title, page in (("For coding agents", "AGENTS.md"), ("Architecture", "ARCHITECTURE.md"))
        ]
    }
    for entry in site["nav"]:
        ((title, below),) = entry.items()
        if isinstance(below, str):
            parts["Overview"] += _lines(title, below)
        else:
            parts[title] = _lines(title, below)
    blocks = [f"# {site['site_name']}"]
    blocks.append(f"> {site['site_description']}")
    for title, lines in parts.items():
        blocks += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def _lines(title: str, below: str | list[dict[str, Any]]) -> list[str]:
    """Return the lines of llms.txt for one page, or for all pages below a menu entry."""
    if isinstance(below, list):
        return [line for entry in below for named in entry.items() for line in _lines(*named)]
    path = ROOT / "docs" / below
    if not path.exists():  # mkdocs makes this page from a notebook
        return []
    return [f"- [{title}](docs/{below}): {_summary(path)}"]


def _summary(page: Path) -> str:
    """Return the first sentence of a page, with links replaced by their text."""
    prose = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = _FIRST_PROSE.search(prose)
    if found is None:
        message = f"{page} has no sentence; write one under its title"
        raise ValueError(message)
    sentence = _SENTENCE_END.split(_LINK.sub(r"\1", found[1]), maxsplit=1)[0]
    return " ".join(sentence.split()).removesuffix(":").removesuffix(".")


if __name__ == "__main__":
    TARGET.write_text(llms_txt(), encoding="utf-8")
