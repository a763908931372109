"""How far an op's results are from the exact ones: sums that many calls add up in, and their picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_plugin.numerics.values import as_json
from amp_plugin.precision import short_name

LOWEST_EXPONENT, HIGHEST_EXPONENT = -150, 128  # powers of two that fp32 holds; 0 is counted apart
_SMALLEST, _LARGEST = 1e-9, 1e3  # ends of the axis of errors


@dataclass(kw_only=True, slots=True)
class Errors:
    """Errors of the calls of one op in one module.

    Attributes:
        calls: how many calls were compared.
        own: of the op alone: mean over the elements of |result - exact| / |exact|, where exact is the same op
            in the wide dtype on the same inputs; rounding once gives a quarter of the dtype's eps, an
            underflow 1. Worst call.
        arriving: of all ops so far: norm(result - other) / norm(other), where other is the same op of a run
            that rounds nothing. Worst call.
        largest: the largest magnitude of a finite result.
        narrow: the dtype of the results, of several that with the smallest range.
        elements: in all results.
        underflowed: results that are 0 though the exact ones are not.
        subnormal: results so small that they have fewer bits.
        infinite: results that are not finite though the exact ones are.
        exponents: how many results have each power of two, from ``LOWEST_EXPONENT`` on.
    """

    calls: int = 0
    own: float = 0.0
    arriving: float = 0.0
    largest: float = 0.0
    narrow: torch.dtype = torch.float32
    elements: int = 0
    underflowed: int = 0
    subnormal: int = 0
    infinite: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1))

    def add(self, result: Tensor, exact: Tensor, arriving: Tensor) -> None:
        """Add a result, what the op makes of the same inputs in the wide dtype, and the other run's."""
        info, values = torch.finfo(result.dtype), result.to(exact.dtype)
        magnitudes, finite = values.abs(), values.isfinite()
        self.calls += 1
        self.own = max(self.own, _mean_relative_error(values, exact))
        self.arriving = max(self.arriving, distance(values, arriving))
        self.narrow = min(self.narrow, result.dtype, key=lambda dtype: torch.finfo(dtype).max)
        self.largest = max(self.largest, float(torch.where(finite, magnitudes, 0.0).max()))
        self.elements += values.numel()
        self.underflowed += int(((values == 0) & (exact != 0)).sum())
        self.subnormal += int(((values != 0) & (magnitudes < info.smallest_normal)).sum())
        self.infinite += int((~finite & exact.isfinite()).sum())
        exponents = torch.frexp(magnitudes[finite & (values != 0)].double()).exponent.long() - 1
        places = (exponents - LOWEST_EXPONENT).clamp(0, len(self.exponents) - 1)
        counts = torch.bincount(places, minlength=len(self.exponents)).tolist()
        self.exponents = [old + new for old, new in zip(self.exponents, counts, strict=True)]

    @property
    def own_in_eps(self) -> float:
        """The op's own error in units of its dtype's eps: 0.25 is rounding, 1 and more is not."""
        return self.own / torch.finfo(self.narrow).eps

    @property
    def headroom(self) -> float:
        """Powers of two between the largest result and the largest number of its dtype."""
        return math.log2(torch.finfo(self.narrow).max / self.largest) if self.largest else math.inf

    @property
    def span(self) -> range:
        """The powers of two that results have, from the smallest to the largest."""
        held = [index + LOWEST_EXPONENT for index, count in enumerate(self.exponents) if count]
        return range(held[0], held[-1] + 1) if held else range(0)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values; the histogram without empty ends."""
        same = ("calls", "largest", "elements", "underflowed", "subnormal", "infinite")
        told: dict[str, Any] = {name: getattr(self, name) for name in same}
        told |= {"own_error": self.own, "arriving_error": self.arriving, "headroom_bits": self.headroom}
        told |= {"dtype": self.narrow, "first_exponent": self.span.start if self.span else None}
        told["exponents"] = [self.exponents[exponent - LOWEST_EXPONENT] for exponent in self.span]
        return {name: as_json(value) for name, value in told.items()}


COLUMNS: dict[str, Callable[[Errors], str]] = {
    "in": lambda errors: short_name(errors.narrow),
    "calls": lambda errors: f"{errors.calls:,}",
    "own": lambda errors: f"{errors.own:.1e}",
    "own/eps": lambda errors: f"{errors.own_in_eps:.2f}",
    "arriving": lambda errors: f"{errors.arriving:.1e}",
    "underflow": lambda errors: f"{errors.underflowed / errors.elements:.1%}",
    "headroom": lambda errors: f"{errors.headroom:.1f} bits",
}
"""The columns of a table of errors."""


def _mean_relative_error(values: Tensor, exact: Tensor) -> float:
    """Return the mean of |values - exact| / |exact|, at most 1 per element, where ``exact`` is finite."""
    finite = exact.isfinite()
    values, exact = values[finite].double(), exact[finite].double()
    difference = (values - exact).abs()
    relative = torch.where(difference == 0, 0.0, difference / exact.abs()).nan_to_num(nan=1.0)
    return float(relative.clamp(max=1.0).mean()) if relative.numel() else 0.0


def distance(value: Tensor, exact: Tensor, order: float = 2.0) -> float:
    """Return the norm of a difference relative to that of ``exact``; infinite if one alone is not finite."""
    value, exact = value.detach().double(), exact.detach().double()
    alike = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(alike, 0.0, value - exact)
    size = torch.where(exact.isfinite(), exact, 0.0)
    scale = torch.linalg.vector_norm(size, order).clamp_min(torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(difference, order).nan_to_num(torch.inf, posinf=torch.inf) / scale)


# -- the picture ---------------------------------------------------------------------------------------------


def short_op(op: str) -> str:
    """Return the name of an op without what most names have."""
    return op.removeprefix("aten::").removesuffix(".default")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - loaded for pictures alone
    except ImportError as error:
        msg = "a plot needs matplotlib; run: pip install matplotlib"
        raise ImportError(msg) from error
    return Figure(figsize=(width, height), layout="constrained")


def draw(errors: Mapping[tuple[str, str, str], Errors], path: Path) -> None:
    """Write a picture: errors at the left, how results spread over powers of two at the right.

    Args:
        errors: (module, op, direction) -> errors; a row each, the first on top.
        path: of the file.
    """
    found, rows = list(errors.values()), range(len(errors))
    names = [
        f"{module or '(no module)'}  {short_op(op)}, {direction}, {short_name(row.narrow)}"
        for (module, op, direction), row in errors.items()
    ]
    figure = new_figure(12 + 0.065 * max(map(len, names), default=0), 2.2 + 0.3 * max(len(names), 2))
    left, right = figure.subplots(1, 2, sharey=True)
    for name, height, color in (("arriving", 0.8, "0.85"), ("own", 0.4, "tab:blue")):
        sizes = [min(max(getattr(row, name), _SMALLEST), _LARGEST) for row in found]
        left.barh(rows, sizes, height, color=color, label=name)
    once = [torch.finfo(row.narrow).eps / 4 for row in found]
    left.scatter(once, rows, marker="|", s=200, color="black", label="rounding once (eps / 4)")
    largest = max([1.0, *(min(row.arriving, _LARGEST) for row in found)])
    left.set(xscale="log", xlim=(_SMALLEST, 2 * largest), xlabel="relative error")
    left.set_yticks(rows, names, fontsize=8)
    left.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    _draw_exponents(figure, right, found)
    left.set_ylim(len(names) - 0.5, -0.5)
    figure.savefig(path, dpi=120)


def _draw_exponents(figure: Any, axes: Any, errors: list[Errors]) -> None:
    shares = [[100 * count / max(sum(found.exponents), 1) for count in found.exponents] for found in errors]
    edges = (LOWEST_EXPONENT - 0.5, HIGHEST_EXPONENT + 0.5, len(errors) - 0.5, -0.5)
    image = axes.imshow(
        shares or [[0.0]], aspect="auto", extent=edges, cmap="Greys", norm="asinh", vmin=0.0, vmax=100.0
    )
    figure.colorbar(image, ax=axes, label="results with this power of two, %")
    for bound in ("smallest_normal", "max"):
        places = [math.log2(getattr(torch.finfo(found.narrow), bound)) for found in errors]
        axes.scatter(places, range(len(errors)), marker="|", s=200, color="tab:red")
    held = [exponent for found in errors for exponent in found.span]
    axes.set_xlim(min([*held, -26]) - 2, max([*held, 16]) + 2)
    axes.set_xlabel("power of two of the results; red: normal range of the dtype, if in view")
