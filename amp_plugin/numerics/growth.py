"""Find out whether a model's weights have grown so much that training diverges."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, Final, TypeGuard

from torch import Tensor, nn

from amp_plugin.numerics.values import norm

GROWN: Final = 8.0
"""If a weight's norm has grown by this factor since it was first measured, training has diverged."""

DIVERGES: Final = "the training diverges. Lower the learning rate, warm it up, or clip gradients."


def grown(factor: float) -> str:
    """Return a phrase that says how much the weights have grown, or ``""`` if they have not grown much."""
    return f"weights are {factor:.3g} times as large as at the start: " if factor >= GROWN else ""


def is_measurable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a tensor is a parameter whose values can be read."""
    if tensor is None or type(tensor) is not nn.Parameter:
        return False
    return tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0


def largest_growth(weights: Iterable[tuple[Tensor | None, float]]) -> float:
    """Return the largest factor by which the norm of a weight has grown.

    The factor is at least 1. It is infinite if a norm is no longer finite. If the first norm of a weight is
    smaller than ``0.1 * sqrt(numel)``, the growth is measured from ``0.1 * sqrt(numel)``. A weight whose
    first norm is inf or nan does not count. This waits for the device.

    Args:
        weights: each weight, or None if it no longer exists, with the norm at which it was first measured.
    """
    most = 1.0
    for weight, begun in weights:
        if is_measurable(weight) and math.isfinite(begun):
            factor = norm(weight) / max(begun, 0.1 * math.sqrt(weight.numel()))
            most = max(most, math.inf if math.isnan(factor) else factor)
    return most


class WeightGrowth:
    """Keeps the initial norms of weights, to measure how much the weights grow. It keeps no model alive."""

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self._begun: weakref.WeakKeyDictionary[nn.Module, dict[str, float]] = weakref.WeakKeyDictionary()
        self.add(models)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Store the norms of each model's weights, unless the model was added before."""
        for model in models:
            if model not in self._begun:
                named = model.named_parameters()
                self._begun[model] = {name: norm(param) for name, param in named if is_measurable(param)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the norms out of copies and pickles, because the norms belong to this run."""
        return type(self), ()

    def factor(self) -> float:
        """Return the largest factor by which a weight's norm has grown. This waits for the device."""
        return largest_growth(
            (param, begun[name])
            for model, begun in self._begun.items()
            for name, param in model.named_parameters()
            if name in begun
        )

    def advice(self) -> str:
        """Return a string that says what to do, or ``""`` if the weights have not grown much."""
        text = grown(self.factor())
        return text and f"{text[0].upper()}{text[1:]}{DIVERGES}"
