"""The numbers of two rule sets: a table, a rules file with its evidence, and a picture."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch
from rich import filesize
from rich.table import Table

from amp_plugin.casting.rules_files import torch_release
from amp_plugin.tuning.measure import Measurement
from amp_plugin.tuning.search import Aim, Tried

Place = tuple[float, float]


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, in inches."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - loaded for pictures alone
    except ImportError as error:
        msg = "a plot needs matplotlib; run: pip install matplotlib"
        raise ImportError(msg) from error
    return Figure(figsize=(width, height), layout="constrained")


def _size(count: float) -> str:
    return filesize.decimal(round(count))


# Name of a number in a rules file -> its name in a table, its attribute and its text.
_NUMBERS: Final[dict[str, tuple[str, str, Callable[[float], str]]]] = {
    "saved": ("saved for backward", "saved_bytes", _size),
    "cast": ("cast", "cast_bytes", _size),
    "error": ("gradient error", "error", "{:.3e}".format),
    "mean error": ("mean error of the parameters", "mean_error", "{:.3e}".format),
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
    for name, attribute, text in _NUMBERS.values():
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
    device_type: str,
    changes: Sequence[Tried],
    *,
    before: Measurement,
    after: Measurement,
    head: Sequence[str],
) -> str:
    """Return a rules file."""
    version, today = vars(sys.modules["amp_plugin"])["__version__"], datetime.now(timezone.utc).date()
    made = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
    numbers = [
        f"{name}: {old} -> {new}" + (f" ({changed})" if changed else "")
        for name, old, new, changed in _rows(before, after)
    ]
    lines = [f"# {comment}" for comment in (*head, made, *numbers)]
    lines += [f"device_type: {device_type}", f"torch: '{torch_release()}'"]
    lines.append("rules:" if changes else "rules: {}")
    last = before
    for entry in changes:
        now = entry.measurement or last
        gains = [f"batches that overflow {last.failed} -> {now.failed}"] if now.failed < last.failed else []
        for name, (_, attribute, _) in list(_NUMBERS.items())[:3]:
            gain = change(getattr(last, attribute), getattr(now, attribute))
            gains += [f"{name} {gain}"] if gain else []
        lines.append(f"  {entry.changes[0]}  # {', '.join(gains)}")
        last = now
    return "\n".join(lines) + "\n"


# -- the picture ---------------------------------------------------------------------------------

_COLORS: Final = {"lower_precision": "tab:orange", "unchanged": "tab:green", "fp32": "tab:purple"}
_COSTS: Final = {"memory": "bytes saved for backward", "casts": "bytes cast", "accuracy": "gradient error"}


def draw(tried: Sequence[Tried], before: Measurement, after: Measurement, aim: Aim, path: Path) -> None:
    """Write a picture: what each set costs, and the factor by which what must not grow does.

    A set is a point in the colour of its last rule; the default, the chosen set and the budget are marked.

    Args:
        tried: the sets; those that the program does not run with, or whose gradients overflow, are left out.
        before: of the default rules.
        after: of the chosen ones.
        aim: what it was searched for.
        path: of the file; its ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    is_relative = 0 < aim.cost(before) < math.inf

    def place(measured: Measurement, batches: int) -> Place:
        default = replace(before, errors=before.errors[:batches])
        return aim.cost(measured) / (aim.cost(default) if is_relative else 1), aim.growth(measured, default)

    figure = _new_figure(9, 6)
    axes = figure.subplots()
    labels = _draw_sets(axes, tried, place)
    marks = {"default rules": (before, "s", "tab:blue"), "chosen rules": (after, "*", "tab:red")}
    marked = []
    for label, (measured, marker, color) in marks.items():
        at = place(measured, len(measured.errors))
        if all(map(math.isfinite, at)):
            axes.scatter(*at, s=130, marker=marker, color=color, label=label, zorder=3)
            marked.append(at)
    if before.failed < len(before.errors):  # a cure has no budget
        axes.axhline(1 + aim.budget, color="black", linewidth=1, linestyle="--", label="budget")
    grows = "bytes, saved or cast" if aim.goal == "accuracy" else "gradient error, whole or mean"
    factor = ": factor over the default rules"
    axes.set(xlabel=_COSTS[aim.goal] + factor * is_relative, ylabel=grows + factor)
    axes.grid(visible=True, alpha=0.3)
    _write_labels(figure, axes, labels, marked)
    figure.legend(loc="outside upper center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_sets(
    axes: Any, tried: Sequence[Tried], place: Callable[[Measurement, int], Place]
) -> dict[str, Place]:
    """Draw each set as a point, those with the same last rule in one colour; return label -> place."""
    labels: dict[str, Place] = {}
    colors: dict[str, dict[str, Place]] = {}
    for attempt in tried:
        if attempt.changes and attempt.measurement is not None:
            last, others = attempt.changes[-1], len(attempt.changes) - 1
            label = f"{last}".removeprefix("aten::") + (f" + {others}" if others else "")
            at = place(attempt.measurement, attempt.batches)
            if all(map(math.isfinite, at)):
                labels[label] = colors.setdefault(last.rule.value, {})[label] = at
    for rule, color in _COLORS.items():
        if rule in colors:
            axes.scatter(*zip(*colors[rule].values(), strict=True), s=24, color=color, label=rule)
    return labels


def _write_labels(figure: Any, axes: Any, labels: dict[str, Place], marked: Sequence[Place]) -> None:
    """Write the names of sets inside the axes, those alone that cover no other and no mark."""
    from matplotlib.transforms import Bbox  # noqa: PLC0415 - loaded for pictures alone

    axes.margins(0.08)
    middle = sum(axes.get_xlim()) / 2
    texts = []
    for name, at in labels.items():
        offset, side = ((-7, 3), "right") if at[0] > middle else ((7, 3), "left")
        texts.append(axes.annotate(name, at, offset, textcoords="offset points", ha=side, fontsize=7))
    figure.draw_without_rendering()
    taken = [Bbox.from_extents(x - 9, y - 9, x + 9, y + 9) for x, y in map(axes.transData.transform, marked)]
    for text in texts:
        box = text.get_window_extent()
        text.set_visible(not any(box.overlaps(other) for other in taken))
        taken += [box] if text.get_visible() else []
