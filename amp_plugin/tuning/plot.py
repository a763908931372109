"""Draw the sets of rules that were tried: error against bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

try:
    from matplotlib.figure import Figure
except ImportError as error:
    msg = "a plot needs matplotlib; run: pip install matplotlib"
    raise ImportError(msg) from error

from amp_plugin.tuning.measurement import Measurement
from amp_plugin.tuning.search import Tried


def draw(
    tried: Sequence[Tried], before: Measurement, after: Measurement, path: Path, *, in_casts: bool
) -> None:
    """Write a picture: each set a point, the default and the chosen set marked.

    Args:
        tried: the sets; those that the program does not run with, or whose gradients overflow, are left out.
        before: of the default rules.
        after: of the chosen ones.
        path: of the file; its ending says the format.
        in_casts: show bytes cast instead of bytes saved for backward.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = [(attempt.measurement, attempt.batches) for attempt in tried if attempt.changes]
    measured = [(point, batches) for point, batches in points if point is not None]
    places = [_place(point, before, batches, in_casts=in_casts) for point, batches in measured]
    finite = [place for place in places if math.isfinite(place[1])]
    axes.scatter([x for x, _ in finite], [y for _, y in finite], s=24, color="0.65", label="tried")
    for label, marked, marker, color in (
        ("default rules", before, "s", "tab:blue"),
        ("chosen rules", after, "*", "tab:red"),
    ):
        x, y = _place(marked, before, len(before.errors), in_casts=in_casts)
        if math.isfinite(y):
            axes.scatter([x], [y], s=130, marker=marker, color=color, label=label)
    axes.set_xlabel(f"megabytes {'cast' if in_casts else 'saved for backward'}, for each batch")
    axes.set_ylabel("relative error of the gradient" + (", default rules: 1" if before.failed == 0 else ""))
    axes.set_title("Sets of op rules")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _place(
    measured: Measurement, before: Measurement, batches: int, *, in_casts: bool
) -> tuple[float, float]:
    """Return megabytes, and the error over the default's on the same batches, where that is finite."""
    size = measured.cast_bytes if in_casts else measured.saved_bytes
    default = mean([error.whole for error in before.errors[:batches]])
    is_scaled = before.failed == 0 and default > 0
    return size / 1e6, measured.error / default if is_scaled else measured.error
