"""How far an op's results are from the exact ones: sums that many calls add up in, and their picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        limit: the largest number of the narrowest dtype of a result.
        narrow: that dtype.
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
    limit: float = math.inf
    narrow: torch.dtype = torch.float32
    elements: int = 0
    underflowed: int = 0
    subnormal: int = 0
    infinite: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1))

    def add(self, result: Tensor, exact: Tensor, arriving: Tensor) -> None:
        """Add one result.

        Args:
            result: what the program's op made.
            exact: the same op in the wide dtype on the same inputs.
            arriving: the same op of the run in the wide dtype.
        """
        values = result.to(exact.dtype)
        self.calls += 1
        self.own = max(self.own, mean_relative_error(values, exact))
        self.arriving = max(self.arriving, relative_error(values, arriving))
        info = torch.finfo(result.dtype)
        if info.max < self.limit or result.dtype.itemsize < self.narrow.itemsize:
            self.limit, self.narrow = info.max, result.dtype
        magnitudes = values.abs()
        finite = magnitudes.isfinite()
        if bool(finite.any()):
            self.largest = max(self.largest, float(magnitudes[finite].max()))
        self.elements += values.numel()
        self.underflowed += int(((values == 0) & (exact != 0)).sum())
        self.subnormal += int(((values != 0) & (magnitudes < info.smallest_normal)).sum())
        self.infinite += int((~finite & exact.isfinite()).sum())
        self._count_exponents(magnitudes[finite & (values != 0)])

    def _count_exponents(self, magnitudes: Tensor) -> None:
        exponents = torch.frexp(magnitudes.double()).exponent.long() - 1 - LOWEST_EXPONENT
        counts = torch.bincount(exponents.clamp(0, len(self.exponents) - 1), minlength=len(self.exponents))
        self.exponents = [old + new for old, new in zip(self.exponents, counts.tolist(), strict=True)]

    @property
    def own_in_eps(self) -> float:
        """The op's own error in units of its dtype's eps: 0.25 is rounding, 1 and more is not."""
        return self.own / torch.finfo(self.narrow).eps

    @property
    def headroom(self) -> float:
        """Powers of two between the largest result and the largest number of its dtype."""
        return math.log2(self.limit / self.largest) if self.largest else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values; the histogram without empty ends."""
        held = [index for index, count in enumerate(self.exponents) if count]
        span = self.exponents[held[0] : held[-1] + 1] if held else []
        return {
            "calls": self.calls,
            "own_error": _plain(self.own),
            "arriving_error": _plain(self.arriving),
            "largest": self.largest,
            "dtype": str(self.narrow).removeprefix("torch."),
            "headroom_bits": _plain(self.headroom),
            "elements": self.elements,
            "underflowed": self.underflowed,
            "subnormal": self.subnormal,
            "infinite": self.infinite,
            "first_exponent": held[0] + LOWEST_EXPONENT if held else None,
            "exponents": span,
        }


def mean_relative_error(values: Tensor, exact: Tensor) -> float:
    """Return the mean of |values - exact| / |exact|, at most 1 an element, where ``exact`` is finite.

    Args:
        values: of any shape.
        exact: of the same shape, fp32 or fp64.
    """
    finite = exact.isfinite()
    values, exact = values[finite].double(), exact[finite].double()
    if not exact.numel():
        return 0.0
    difference = (values - exact).abs()
    relative = torch.where(difference == 0, 0.0, difference / exact.abs()).nan_to_num(nan=1.0)
    return float(relative.clamp(max=1.0).mean())


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Return norm(values - exact) / norm(exact) of the elements that are finite in ``exact``.

    Args:
        values: of any shape; one that is not finite where ``exact`` is gives an infinite error.
        exact: of the same shape, fp32 or fp64.

    Returns:
        0 for no elements or equal ones; inf where ``exact`` is 0 and ``values`` are not.
    """
    finite = exact.isfinite()
    values, exact = values[finite].double(), exact[finite].double()
    difference = float(torch.linalg.vector_norm(values - exact))
    if difference == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(exact))
    return difference / norm if norm and not math.isnan(difference) else math.inf


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


# -- the picture ---------------------------------------------------------------------------------------------


def draw(errors: Mapping[tuple[str, str, str], Errors], path: Path) -> None:
    """Write a picture: errors at the left, how results spread over powers of two at the right.

    Args:
        errors: (module, op, direction) -> errors; a row each, the first on top.
        path: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - loaded for pictures alone
    except ImportError as error:
        msg = "a plot needs matplotlib; run: pip install matplotlib"
        raise ImportError(msg) from error
    names = [_name(*key, found) for key, found in errors.items()]
    width = 12 + 0.065 * max(map(len, names), default=0)
    figure = Figure(figsize=(width, 2.2 + 0.3 * max(len(errors), 2)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_errors(left, list(errors.values()))
    _draw_exponents(figure, right, list(errors.values()))
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.set_ylim(len(names) - 0.5, -0.5)
    figure.savefig(path, dpi=120)


def _name(module: str, op: str, direction: str, errors: Errors) -> str:
    plain = op.removeprefix("aten::").removesuffix(".default")
    return f"{module or '(no module)'}  {plain}, {direction}, {short_name(errors.narrow)}"


def _draw_errors(axes: Any, errors: list[Errors]) -> None:
    rows = range(len(errors))
    arriving = [min(max(found.arriving, _SMALLEST), _LARGEST) for found in errors]
    own = [min(max(found.own, _SMALLEST), _LARGEST) for found in errors]
    axes.barh(rows, arriving, 0.8, color="0.85", label="arriving (norm)")
    axes.barh(rows, own, 0.4, color="tab:blue", label="own (mean)")
    for row, found in enumerate(errors):
        eps = torch.finfo(found.narrow).eps
        label = "" if row else "rounding once (eps / 4)"
        axes.plot([eps / 4] * 2, [row - 0.45, row + 0.45], color="black", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xlim(_SMALLEST, 2 * max(1.0, *arriving) if arriving else 1.0)
    axes.set_xlabel("relative error")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _draw_exponents(figure: Any, axes: Any, errors: list[Errors]) -> None:
    shares = [[100 * count / max(sum(found.exponents), 1) for count in found.exponents] for found in errors]
    edges = (LOWEST_EXPONENT - 0.5, HIGHEST_EXPONENT + 0.5, len(errors) - 0.5, -0.5)
    image = axes.imshow(
        shares or [[0.0]], aspect="auto", extent=edges, cmap="Greys", norm="asinh", vmin=0.0, vmax=100.0
    )
    figure.colorbar(image, ax=axes, label="results with this power of two, %")
    low, high = _shown_exponents(errors)
    for row, found in enumerate(errors):
        info = torch.finfo(found.narrow)
        for bound in (info.smallest_normal, info.max):
            place = math.log2(bound)
            if low <= place <= high:
                axes.plot([place] * 2, [row - 0.5, row + 0.5], color="tab:red", linewidth=1)
    axes.set_xlim(low, high)
    axes.set_xlabel("power of two of the results; red: normal range of the dtype")


def _shown_exponents(errors: list[Errors]) -> tuple[float, float]:
    """Return the powers of two that hold all results."""
    held = [index for found in errors for index, count in enumerate(found.exponents) if count]
    low = min(held, default=-LOWEST_EXPONENT) + LOWEST_EXPONENT
    high = max(held, default=-LOWEST_EXPONENT) + LOWEST_EXPONENT
    return min(low, -26) - 2.0, max(high, 16) + 2.0
