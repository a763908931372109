"""The numbers of two rule sets beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich import filesize
from rich.table import Table

from amp_plugin.tuning.measurement import Measurement


def tuning_table(before: Measurement, after: Measurement, seconds: tuple[float, float]) -> Table:
    """Return a table with a row for each number, by the default rules and by the chosen ones."""
    table = Table(box=None, pad_edge=False)
    table.add_column("for each batch")
    for column in ("default", "tuned", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows(before, after, seconds):
        table.add_row(name, *cells)
    return table


def rows(
    before: Measurement, after: Measurement, seconds: tuple[float, float] | None = None
) -> list[tuple[str, str, str, str]]:
    """Return name, value before, value after, and change, as texts."""
    found: list[tuple[str, Callable[[float], str], float, float]] = [
        ("saved for backward", size, before.saved_bytes, after.saved_bytes),
        ("cast", size, before.cast_bytes, after.cast_bytes),
        ("gradient error", "{:.3e}".format, before.error, after.error),
        ("error of a parameter, mean", "{:.3e}".format, before.mean_error, after.mean_error),
    ]
    if seconds is not None:
        found.append(("time", milliseconds, *seconds))
    shown = [(name, text(old), text(new), change(old, new)) for name, text, old, new in found]
    failed = (str(before.failed), str(after.failed))
    return [*shown, ("batches that overflow", *failed, "")] if failed != ("0", "0") else shown


def size(count: float) -> str:
    """Return bytes as people read them."""
    return filesize.decimal(round(count))


def milliseconds(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds * 1e3:.1f} ms"


def change(before: float, after: float) -> str:
    """Return how much more or less something is, ``"-12.3 %"``; ``""`` where it cannot be said."""
    if before == 0 or not (math.isfinite(before) and math.isfinite(after)):
        return ""
    return f"{(after / before - 1) * 100:+.1f} %"
