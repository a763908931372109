"""Draw the sets of rules that were tried: error against bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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
    points = [attempt.measurement for attempt in tried if attempt.measurement and attempt.changes]
    finite = [point for point in points if math.isfinite(point.error)]
    axes.scatter(
        *_places(finite, in_casts=in_casts), s=24, color="0.65", label="tried, on part of the batches"
    )
    for label, marked, marker, color in (
        ("default rules", before, "s", "tab:blue"),
        ("chosen rules", after, "*", "tab:red"),
    ):
        axes.scatter(*_places([marked], in_casts=in_casts), s=130, marker=marker, color=color, label=label)
    axes.set_xlabel(f"megabytes {'cast' if in_casts else 'saved for backward'}, for each batch")
    axes.set_ylabel("relative error of the gradient")
    axes.set_title("Sets of op rules")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _places(points: Sequence[Measurement], *, in_casts: bool) -> tuple[list[float], list[float]]:
    shown = [point for point in points if math.isfinite(point.error)]
    sizes = [(point.cast_bytes if in_casts else point.saved_bytes) / 1e6 for point in shown]
    return sizes, [point.error for point in shown]
