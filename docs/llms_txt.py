"""Write llms.txt, the list of the documentation's pages for language models, from mkdocs.yml and the pages.

Each page is a link and the first sentence of the page. Run it after a change of the menu or of a first
sentence: ``python -m docs.llms_txt``.
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
    """Return the text that llms.txt should have.

    Returns:
        The name and a summary of the project, where agents begin, and a section for each part of the menu.
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
    sections = (f"## {title}\n\n" + "\n".join(lines) for title, lines in parts.items())
    return f"# {site['site_name']}\n\n> {site['site_description']}\n\n" + "\n\n".join(sections) + "\n"


def _lines(title: str, below: str | list[dict[str, Any]]) -> list[str]:
    """Return the lines of a page, or of all pages below an entry of the menu."""
    if isinstance(below, list):
        return [line for entry in below for named in entry.items() for line in _lines(*named)]
    path = ROOT / "docs" / below
    if not path.exists():  # a page that the build of the site makes of a notebook
        return []
    return [f"- [{title}](docs/{below}): {_summary(path)}"]


def _summary(page: Path) -> str:
    """Return the first sentence of a page, without its links."""
    prose = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = _FIRST_PROSE.search(prose)
    if found is None:
        message = f"{page} has no sentence; write one under its title"
        raise ValueError(message)
    sentence = _SENTENCE_END.split(_LINK.sub(r"\1", found[1]), maxsplit=1)[0]
    return " ".join(sentence.split()).removesuffix(":").removesuffix(".")


if __name__ == "__main__":
    TARGET.write_text(llms_txt(), encoding="utf-8")
