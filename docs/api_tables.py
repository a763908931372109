"""Write the tables of docs/reference/api.md and docs/reference/options.md.

The tables are made from the first sentence of each docstring and from the dataclasses of options. mkdocs adds
the signatures and the full docstrings when it builds the site. Run ``python -m docs.api_tables`` after you
change an option or the first sentence of a public docstring.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import amp_plugin
from amp_plugin.adapters.ignite import IgniteOptions
from amp_plugin.options import (
    AccelerateOptions,
    GradScalerOptions,
    LossScaleOptions,
    PluginOptions,
    PrecisionOptions,
    option_defaults,
    option_docs,
)

REFERENCE = Path(__file__).parent / "reference"
PAGE = REFERENCE / "api.md"
OPTIONS_PAGE = REFERENCE / "options.md"
# Maps the name of each table to the class whose options it lists and to a base class (or None).
# Options inherited from the base class are left out, because that class has its own table.
OPTION_TABLES: dict[str, tuple[type, type | None]] = {
    "loss scale": (LossScaleOptions, None),
    "precision": (PrecisionOptions, LossScaleOptions),
    "GradScaler": (GradScalerOptions, LossScaleOptions),
    "plugins": (PluginOptions, PrecisionOptions),
    "ignite": (IgniteOptions, PluginOptions),
    "Accelerate": (AccelerateOptions, PrecisionOptions),
}
_SECTION = re.compile(r"^(## .+)\n\n(?:\|.*\n)*\n*", re.MULTILINE)
_ENTRY = re.compile(r"^<!--\s*:::\s*([\w.]+)\s*-->$", re.MULTILINE)
_IS_MARKUP = re.compile(r":\w+:`~?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert mkdocstrings directives in place of HTML comments that name API entries (an mkdocs hook)."""
    return _ENTRY.sub(r"\n::: \1\n", markdown)


def with_tables(page: str) -> str:
    """Return the API page, after regenerating the table of names under each heading."""
    first, *parts = _SECTION.split(page)
    sections = zip(parts[::2], parts[1::2], strict=True)
    return first + "".join(f"{heading}\n\n{_table(text)}\n\n{text}" for heading, text in sections)


def _table(section: str) -> str:
    rows = [f"| `{_imported_as(entry)}` | {_meaning(entry)} |" for entry in _ENTRY.findall(section)]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _imported_as(entry: str) -> str:
    """Return the shortest name under which users can import an entry."""
    name = entry.rpartition(".")[2]
    return f"amp_plugin.{name}" if name in dir(amp_plugin) else entry


def _meaning(entry: str) -> str:
    """Return the first paragraph of an entry's docstring as a Markdown table cell."""
    module, _, name = entry.rpartition(".")
    paragraph = (inspect.getdoc(getattr(importlib.import_module(module), name)) or "").partition("\n\n")[0]
    return _IS_MARKUP.sub(r"`\1`", _as_cell(paragraph))


def with_options(page: str) -> str:
    """Return the options page, after regenerating each table between ``begin NAME`` and ``end NAME``."""
    for name, (options, without) in OPTION_TABLES.items():
        before, rest = page.split(f"<!-- begin {name} -->")
        after = rest.split(f"<!-- end {name} -->")[1]
        table = _option_table(options, without)
        page = f"{before}<!-- begin {name} -->\n{table}\n<!-- end {name} -->{after}"
    return page


def _option_table(options: type, without: type | None) -> str:
    listed_elsewhere = option_defaults(without) if without else {}
    defaults = option_defaults(options)
    rows = [
        f"| `{name}` | {_default(defaults[name])} | {_as_cell(text)} |"
        for name, text in option_docs(options).items()
        if name not in listed_elsewhere
    ]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def _as_cell(text: str) -> str:
    """Return a docstring's text as a Markdown table cell."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _default(value: object) -> str:
    return "none" if value in (None, ()) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    for page, made in ((PAGE, with_tables), (OPTIONS_PAGE, with_options)):
        page.write_text(made(page.read_text(encoding="utf-8")), encoding="utf-8")
