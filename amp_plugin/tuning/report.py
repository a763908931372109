"""The numbers of two rule sets: a table, a rules file with its evidence, a picture, a progress bar."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich import filesize
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from amp_plugin.casting.rules_files import torch_release
from amp_plugin.tuning.measure import Measurement
from amp_plugin.tuning.search import Tried


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


def rules_file(
    device_type: str,
    changes: Sequence[Tried],
    *,
    before: Measurement,
    after: Measurement,
    head: Sequence[str],
) -> str:
    """Return a rules file.

    Args:
        device_type: of the rules.
        changes: the rules, each measured together with those above it.
        before: of the default rules.
        after: of the chosen ones.
        head: lines that say what was done.
    """
    version, today = (
        vars(sys.modules[__name__.partition(".")[0]])["__version__"],
        datetime.now(timezone.utc).date(),
    )
    made = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
    comments = [*head, made, *(_line(*row) for row in rows(before, after))]
    text = "".join(f"# {comment}\n" for comment in comments)
    text += f"device_type: {device_type}\ntorch: '{torch_release()}'\n"
    return text + (f"rules:\n{_entries(changes, before)}" if changes else "rules: {}\n")


def _line(name: str, first: str, second: str, changed: str) -> str:
    return f"{name}: {first} -> {second}" + (f" ({changed})" if changed else "")


def _entries(changes: Sequence[Tried], before: Measurement) -> str:
    lines, last = [], before
    for entry in changes:
        (chosen,), now = entry.changes, entry.measurement or last
        gains = [
            f"{name} {gain}"
            for name, gain in (
                ("saved", change(last.saved_bytes, now.saved_bytes)),
                ("cast", change(last.cast_bytes, now.cast_bytes)),
                ("error", change(last.error, now.error)),
            )
            if gain
        ]
        if now.failed < last.failed:
            gains.insert(0, f"batches that overflow {last.failed} -> {now.failed}")
        lines.append(f"  {chosen.op}: {chosen.rule.value}  # {', '.join(gains)}\n")
        last = now
    return "".join(lines)


def draw(
    tried: Sequence[Tried],
    before: Measurement,
    after: Measurement,
    path: Path,
    *,
    in_casts: bool,
    limit: float | None,
) -> None:
    """Write a picture: each set a point with its name, default and chosen set marked, the budget a line.

    Args:
        tried: the sets; those that the program does not run with, or whose gradients overflow, are left out.
        before: of the default rules.
        after: of the chosen ones.
        path: of the file; its ending says the format.
        in_casts: show bytes cast instead of bytes saved for backward.
        limit: the error that the budget allows, the default's being 1; None where bytes are the budget.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - loaded for pictures alone
    except ImportError as error:
        msg = "a plot needs matplotlib; run: pip install matplotlib"
        raise ImportError(msg) from error
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("whole", "mean"), strict=True):
        _draw_sets(axes, tried, before, kind, in_casts=in_casts)
        for label, marked, marker, color in (
            ("default rules", before, "s", "tab:blue"),
            ("chosen rules", after, "*", "tab:red"),
        ):
            x, y = _place(marked, before, len(before.errors), kind, in_casts=in_casts)
            if math.isfinite(y):
                axes.scatter([x], [y], s=130, marker=marker, color=color, label=label)
        if limit is not None and before.failed == 0:
            axes.axhline(limit, color="black", linewidth=1, linestyle="--", label="budget")
        scaled = ", default rules: 1" if before.failed == 0 else ""
        axes.set_xlabel(f"megabytes {'cast' if in_casts else 'saved for backward'}, per batch")
        whose = "the whole gradient" if kind == "whole" else "a parameter, mean"
        axes.set_ylabel(f"error of {whose}{scaled}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_sets(axes: Any, tried: Sequence[Tried], before: Measurement, kind: str, *, in_casts: bool) -> None:
    """Draw each set as a point, with its name where there is room."""
    places = {
        _label(attempt): _place(attempt.measurement, before, attempt.batches, kind, in_casts=in_casts)
        for attempt in tried
        if attempt.changes and attempt.measurement is not None
    }
    finite = {label: place for label, place in places.items() if math.isfinite(place[1])}
    axes.scatter(*_columns(list(finite.values())), s=20, color="0.6", label="tried")
    axes.grid(visible=True, alpha=0.3)
    for label, place in _apart(finite):
        axes.annotate(label, place, (4, 3), textcoords="offset points", fontsize=6, color="0.35")


def _label(attempt: Tried) -> str:
    """Return a set's name: its only rule, or its last one and how many others."""
    last = attempt.changes[-1]
    others = f" + {len(attempt.changes) - 1}" if len(attempt.changes) > 1 else ""
    return f"{last.op.removeprefix('aten::')}: {last.rule.value}{others}"


def _columns(places: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def _apart(places: dict[str, tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    """Return the names that have room: of points that lie together the first is named."""
    xs, ys = _columns(list(places.values()))
    width, height = (max(values, default=0) - min(values, default=0) or 1.0 for values in (xs, ys))
    shown: list[tuple[str, tuple[float, float]]] = []
    for label, (x, y) in places.items():
        if all(abs(x - u) > 0.12 * width or abs(y - v) > 0.03 * height for _, (u, v) in shown):
            shown.append((label, (x, y)))
    return shown


def _place(
    measured: Measurement, before: Measurement, batches: int, kind: str, *, in_casts: bool
) -> tuple[float, float]:
    """Return megabytes, and the error over the default's on the same batches, where that is finite."""
    size = measured.cast_bytes if in_casts else measured.saved_bytes
    default = mean([getattr(error, kind) for error in before.errors[:batches]])
    error = measured.error if kind == "whole" else measured.mean_error
    is_scaled = before.failed == 0 and default > 0
    return size / 1e6, error / default if is_scaled else error


class ShownProgress:
    """Says what runs and how many rule sets have been tried.

    Args:
        progress: the bar.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("tuning", total=None, tried=0)
        self._tried = 0

    def say(self, what: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=what)

    def tried(self, attempt: Tried) -> None:
        """Count a set of rules that was tried."""
        self._tried += 1
        names = ", ".join(
            f"{change.op.removeprefix('aten::')}: {change.rule.value}" for change in attempt.changes
        )
        self._progress.update(
            self._task, advance=1, tried=self._tried, description=names or "the default rules"
        )


@contextmanager
def shown_progress(*, enabled: bool) -> Iterator[ShownProgress]:
    """Show a bar on standard error while the block runs.

    Args:
        enabled: False shows nothing.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[tried]} sets of rules tried"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=Console(file=sys.stderr), disable=not enabled, transient=True
    ) as progress:
        yield ShownProgress(progress)
