"""Whether the weights of a model have grown so much that the training diverges."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, Final, TypeGuard

from torch import Tensor, nn

from amp_plugin.numerics.values import norm

GROWN: Final = 8.0
"""Weights so many times as large as when they were first seen have diverged."""

DIVERGES: Final = "the training diverges. Lower the learning rate, warm it up, or clip gradients."


def grown(factor: float) -> str:
    """Return how large weights have become, as the begin of a sentence; empty if they have not grown much."""
    return f"weights are {factor:.3g} times as large as at the start: " if factor >= GROWN else ""


def is_measurable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a tensor is a parameter whose numbers can be read."""
    if tensor is None or type(tensor) is not nn.Parameter:
        return False
    return tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0


def growth_of(tensor: Tensor, begun: float) -> float:
    """Return by which factor a weight has grown since it had a norm; infinite if it is not finite now.

    One that began near 0 counts from the size that weights of as many elements begin with.
    """
    factor = norm(tensor) / max(begun, 0.1 * math.sqrt(tensor.numel()))
    return math.inf if math.isnan(factor) else factor


class WeightGrowth:
    """The norms of the weights of models when they were added, to compare with; it keeps no model alive."""

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self._begun: weakref.WeakKeyDictionary[nn.Module, dict[str, float]] = weakref.WeakKeyDictionary()
        self.add(models)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Measure the weights of models that are new."""
        for model in models:
            if model not in self._begun:
                named = model.named_parameters()
                self._begun[model] = {name: norm(param) for name, param in named if is_measurable(param)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the norms, which belong to this run."""
        return type(self), ()

    def factor(self) -> float:
        """Return by which factor the weights that grew most have grown; it waits for the device."""
        most = 1.0
        for model, begun in self._begun.items():
            for name, param in model.named_parameters():
                if name in begun and is_measurable(param):
                    most = max(most, growth_of(param, begun[name]))
        return most

    def advice(self) -> str:
        """Return what to do if the weights have grown; empty if they have not, or nobody knows."""
        text = grown(self.factor())
        return text and f"{text[0].upper()}{text[1:]}{DIVERGES}"
