"""The numbers of two rule sets: a table, and a rules file with its evidence."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Final

import torch
from rich import filesize
from rich.table import Table

from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_files import torch_release
from amp_plugin.tuning.measure import Measurement
from amp_plugin.tuning.search import Change


def _size(count: float) -> str:
    return filesize.decimal(round(count))


# Name of a number -> its attribute and its text.
_NUMBERS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "saved for backward": ("saved_bytes", _size),
    "cast": ("cast_bytes", _size),
    "gradient error": ("error", "{:.3e}".format),
    "mean error of the parameters": ("mean_error", "{:.3e}".format),
}


def tuning_table(before: Measurement, after: Measurement, seconds: tuple[float, float]) -> Table:
    """Return a table with a row for each number, by the default rules and by the chosen ones."""
    table = Table(box=None, pad_edge=False)
    table.add_column("per batch")
    for column in ("default", "tuned", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    times = [f"{taken * 1e3:.1f} ms" for taken in seconds]
    for cells in [*_rows(before, after), ("time", *times, change(*seconds))]:
        table.add_row(*cells)
    return table


def _rows(before: Measurement, after: Measurement) -> list[tuple[str, ...]]:
    """Return name, value before, value after, and change, as texts."""
    rows: list[tuple[str, ...]] = []
    for name, (attribute, text) in _NUMBERS.items():
        old, new = getattr(before, attribute), getattr(after, attribute)
        rows.append((name, text(old), text(new), change(old, new)))
    if before.failed or after.failed:
        rows.append(("batches that overflow", str(before.failed), str(after.failed), ""))
    return rows


def change(before: float, after: float) -> str:
    """Return how much more or less something is, ``"-12.3 %"``; ``""`` where it cannot be said."""
    if before == 0 or not (math.isfinite(before) and math.isfinite(after)):
        return ""
    return f"{(after / before - 1) * 100:+.1f} %"


def rules_file(
    rules: OpRules, changes: Sequence[Change], before: Measurement, after: Measurement, head: Sequence[str]
) -> str:
    """Return a rules file."""
    version, today = vars(sys.modules["amp_plugin"])["__version__"], datetime.now(timezone.utc).date()
    made = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
    numbers = [
        f"{name}: {old} -> {new}" + (f" ({changed})" if changed else "")
        for name, old, new, changed in _rows(before, after)
    ]
    lines = [f"# {comment}" for comment in (*head, made, *numbers)]
    lines += [f"device_type: {rules.device_type}", f"torch: '{torch_release()}'"]
    lines += ["rules:" if changes else "rules: {}", *(f"  {change}" for change in changes)]
    return "\n".join(lines) + "\n"
