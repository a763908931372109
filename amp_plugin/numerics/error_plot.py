"""Draw errors and exponents of the ops of a shadow run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    msg = "a plot needs matplotlib; run: pip install matplotlib"
    raise ImportError(msg) from error

from amp_plugin.numerics.rounding_errors import HIGHEST_EXPONENT, LOWEST_EXPONENT, Errors
from amp_plugin.precision import short_name

_SMALLEST = 1e-9  # where the axis of errors begins


def draw(errors: Mapping[tuple[str, str, str], Errors], path: Path) -> None:
    """Write a picture: errors at the left, how results spread over powers of two at the right.

    Args:
        errors: (module, op, direction) -> errors; a row each, the first on top.
        path: of the file.
    """
    figure = Figure(figsize=(13, 1.8 + 0.3 * max(len(errors), 2)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [_name(*key, found) for key, found in errors.items()]
    _draw_errors(left, list(errors.values()))
    _draw_exponents(right, list(errors.values()))
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.set_ylim(len(names) - 0.5, -0.5)
    figure.savefig(path, dpi=120)


def _name(module: str, op: str, direction: str, errors: Errors) -> str:
    plain = op.removeprefix("aten::").removesuffix(".default")
    return f"{module or '(no module)'}  {plain}, {direction}, {short_name(errors.narrow)}"


def _draw_errors(axes: Axes, errors: list[Errors]) -> None:
    rows = range(len(errors))
    arriving = [min(max(found.arriving, _SMALLEST), 1e3) for found in errors]
    axes.barh(rows, arriving, 0.8, color="0.85", label="arriving (norm)")
    axes.barh(rows, [max(found.own, _SMALLEST) for found in errors], 0.4, color="tab:red", label="own (mean)")
    for row, found in enumerate(errors):
        eps = torch.finfo(found.narrow).eps
        label = "" if row else "rounding once (eps / 4)"
        axes.plot([eps / 4] * 2, [row - 0.45, row + 0.45], color="black", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xlim(left=_SMALLEST)
    axes.set_xlabel("relative error")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _draw_exponents(axes: Axes, errors: list[Errors]) -> None:
    shares = [[count / max(sum(found.exponents), 1) for count in found.exponents] for found in errors]
    edges = (LOWEST_EXPONENT - 0.5, HIGHEST_EXPONENT + 0.5, len(errors) - 0.5, -0.5)
    axes.imshow(
        [[math.sqrt(share) for share in row] for row in shares], aspect="auto", extent=edges, cmap="Blues"
    )
    for row, found in enumerate(errors):
        info = torch.finfo(found.narrow)
        for bound in (info.smallest_normal, info.max):
            axes.plot([math.log2(bound)] * 2, [row - 0.5, row + 0.5], color="tab:red", linewidth=1)
    axes.set_xlim(-60, 40)
    axes.set_xlabel("power of two of the results; red: normal range of the dtype")
