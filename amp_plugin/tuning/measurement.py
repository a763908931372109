"""What a rule set costs and how exact its gradients are: measured over a few batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientError:
    """How far the gradients of one batch are from the reference's.

    Attributes:
        whole: norm of the difference over the norm of the reference, all parameters together.
        mean: the same for each parameter, at most 1 each, averaged: no parameter pays for the others.
    """

    whole: float
    mean: float

    @property
    def is_finite(self) -> bool:
        """Whether all gradients were."""
        return math.isfinite(self.whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a rule set costs, for each batch.

    Attributes:
        saved_bytes: bytes that the forward pass saves for the backward pass, weights of the model left out.
        cast_bytes: bytes that casts read and write.
        seconds: time of a batch, measurement included: to compare rule sets by.
        errors: a gradient error for each batch.
    """

    saved_bytes: float
    cast_bytes: float
    seconds: float
    errors: tuple[GradientError, ...]

    @property
    def error(self) -> float:
        """The whole gradient's error, averaged over the batches with finite gradients; inf without any."""
        return mean([error.whole for error in self._finite]) if self._finite else math.inf

    @property
    def mean_error(self) -> float:
        """The parameters' mean error, averaged in the same way."""
        return mean([error.mean for error in self._finite]) if self._finite else math.inf

    @property
    def failed(self) -> int:
        """The number of batches whose gradients are not finite."""
        return len(self.errors) - len(self._finite)

    @property
    def _finite(self) -> list[GradientError]:
        return [error for error in self.errors if error.is_finite]


def middle(seconds: list[float]) -> float:
    """Return the median of some times; nan of none."""
    return median(seconds) if seconds else math.nan
