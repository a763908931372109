"""Write into docs/reference/api.md what each section describes, and the tables of options into their pages.

The signatures and the whole docstrings are put in when the site is built. Run it after a
change of a docstring's first line or of an option: ``python -m docs.api_tables``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import amp_plugin
from amp_plugin.adapters.ignite import IgniteOptions
from amp_plugin.options import AccelerateOptions, PluginOptions, option_defaults, option_docs

OPTIONS = {
    "start/accelerate.md": AccelerateOptions,
    "start/ignite.md": IgniteOptions,
    "start/lightning.md": PluginOptions,
}
DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "api.md"
_SECTION = re.compile(r"^(## .+)\n\n(?:\|.*\n)*\n*", re.MULTILINE)
_ENTRY = re.compile(r"^<!-- ::: ([\w.]+) -->$", re.MULTILINE)
_IS_MARKUP = re.compile(r":\w+:`~?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of the site with the entries that the page on disk hides in comments; mkdocs calls it."""
    return _ENTRY.sub(r"\n::: \1\n", markdown)


def with_tables(page: str) -> str:
    """Return the page with a table of names under each heading, in place of the one that is there."""
    first, *parts = _SECTION.split(page)
    sections = zip(parts[::2], parts[1::2], strict=True)
    return first + "".join(f"{heading}\n\n{_table(text)}\n\n{text}" for heading, text in sections)


def _table(section: str) -> str:
    rows = [f"| `{_imported_as(entry)}` | {_meaning(entry)} |" for entry in _ENTRY.findall(section)]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _imported_as(entry: str) -> str:
    """Return the shortest name by which users reach an entry."""
    name = entry.rpartition(".")[2]
    return f"amp_plugin.{name}" if name in dir(amp_plugin) else entry


def _meaning(entry: str) -> str:
    """Return the first sentence of an entry's docstring, as Markdown in a table."""
    module, _, name = entry.rpartition(".")
    paragraph = (inspect.getdoc(getattr(importlib.import_module(module), name)) or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")
    return _IS_MARKUP.sub(r"`\1`", sentence)


def with_options(page: str, options: type) -> str:
    """Return a page with its table of options between the marks ``begin options`` and ``end options``."""
    defaults = option_defaults(options)
    rows = [
        f"| `{name}` | {_default(defaults[name])} | {text.replace('``', '`').replace('|', chr(92) + '|')} |"
        for name, text in option_docs(options).items()
    ]
    table = "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])
    before, rest = page.split("<!-- begin options -->")
    after = rest.split("<!-- end options -->")[1]
    return f"{before}<!-- begin options -->\n{table}\n<!-- end options -->{after}"


def _default(value: object) -> str:
    return "none" if value in (None, ()) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    for page, options in OPTIONS.items():
        file = DOCS / page
        file.write_text(with_options(file.read_text(encoding="utf-8"), options), encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
