"""Lay out a list of casts as a table that reads well in a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from rich import filesize
from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from amp_plugin.casting.casts import Cast, CastTotals
from amp_plugin.precision import short_name

Row = tuple[str, ...]

_COLUMNS = {"cast": ("module", "op", "argument", "dtypes"), "module": ("module",), "op": ("op",)}
_NOTHING = "no casts: was the code in an amp_plugin.autocast region, and not compiled?"
_PIECES = re.compile(r".+?(?=::|\.|\s|$)")  # of a dotted name, each with the dot before it
_SMALLER_PIECES = re.compile(r".+?(?:_|(?<=[a-z0-9])(?=[A-Z])|$)")


class FoldedName:
    """A cell that breaks its lines at the dots of a name; inside a word only if that is too long.

    Args:
        name: such as ``"Net.block.linear"``, ``"amp_plugin::cast"`` or some words.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def lines(self, width: int) -> list[str]:
        """Return the name in lines of at most ``width`` characters."""
        lines = [""]
        for piece in self._pieces(width):
            if len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece if lines[-1] else piece.lstrip()
        return lines

    def _pieces(self, width: int) -> Iterable[str]:
        for piece in _PIECES.findall(self._name):
            if len(piece.strip()) <= width:
                yield piece
                continue
            for smaller in _SMALLER_PIECES.findall(piece):
                yield from (smaller[start : start + width] for start in range(0, len(smaller), width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.lines(options.max_width)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        pieces = [len(piece.strip()) for piece in _PIECES.findall(self._name)]
        return Measurement(min(max(pieces, default=0), options.max_width), len(self._name))


def cast_table(casts: list[Cast], by: Literal["cast", "module", "op"]) -> Table:
    """Return a rich table; equal casts share a row, the most bytes come first.

    Args:
        casts: in any order.
        by: what a row stands for.

    Raises:
        ValueError: ``by`` is something else.
    """
    if by not in _COLUMNS:
        msg = f"table(by={by!r}): allowed are {', '.join(_COLUMNS)}"
        raise ValueError(msg)
    columns = _COLUMNS[by]
    table = Table(
        title="Casts",
        box=SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_footer=True,
        caption=None if casts else _NOTHING,
    )
    for column in columns:
        footer = "total" if column == columns[0] else ""
        table.add_column(column, no_wrap=column == "dtypes", footer=footer)
    for column, footer in zip(("casts", "cached", "moved"), _counts(CastTotals.of(casts)), strict=True):
        table.add_column(column, justify="right", no_wrap=True, footer=footer)
    for row, totals in _rows(casts, by):
        table.add_row(*map(FoldedName, row), *_counts(totals))
    return table


def _rows(casts: list[Cast], by: str) -> list[tuple[Row, CastTotals]]:
    groups: dict[Row, list[Cast]] = {}
    for cast in casts:
        shown = _shown(cast)
        groups.setdefault(tuple(shown[column] for column in _COLUMNS[by]), []).append(cast)
    rows = [(row, CastTotals.of(alike)) for row, alike in groups.items()]
    return sorted(rows, key=lambda row: -row[1].bytes)


def _shown(cast: Cast) -> dict[str, str]:
    return {
        "module": cast.module or "(no module)",
        "op": cast.op.removeprefix("aten::").removesuffix(".default"),
        "argument": cast.argument if cast.argument == cast.kind else f"{cast.argument} ({cast.kind})",
        "dtypes": f"{short_name(cast.before)} → {short_name(cast.after)}",
    }


def _counts(totals: CastTotals) -> Row:
    return f"{totals.casts:,}", f"{totals.cached:,}", filesize.decimal(totals.bytes)
