"""How far an op's results are from the exact ones: sums that many calls add up in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LOWEST_EXPONENT, HIGHEST_EXPONENT = -150, 128  # powers of two that fp32 holds; 0 is counted apart


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
