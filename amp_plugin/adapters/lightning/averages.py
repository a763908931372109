"""Lightning's callbacks that average weights (EMA, SWA) average float32, not 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn

from amp_plugin.weights.store import convert_to_fp32, in_fp32

# Class of Lightning -> those of its hooks that read or write the weights of the model in training.
_HOOKS: Final = {
    "WeightAveraging": (
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
    ),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
}


class Averages:
    """The averaging callbacks of a run; they copy the model before its weights are stored."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str]] = []

    def watch(self, callbacks: Iterable[Any]) -> None:
        """Give averages float32 weights, and let their hooks see the model in float32 until `release`."""
        self.release()
        for callback in callbacks:
            kinds = {kind.__name__ for kind in type(callback).__mro__}
            for hook in {hook for kind in kinds & _HOOKS.keys() for hook in _HOOKS[kind]}:
                setattr(callback, hook, _OnMasters(getattr(callback, hook)))
                self._wrapped.append((callback, hook))
            average = getattr(callback, "_average_model", None) if kinds & _HOOKS.keys() else None
            if isinstance(average, nn.Module):
                convert_to_fp32(average)

    def release(self) -> None:
        """Give the callbacks their own hooks back."""
        while self._wrapped:
            callback, hook = self._wrapped.pop()
            vars(callback).pop(hook, None)


class _OnMasters:
    """A hook of a callback, run while the model has float32 parameters; can be pickled with it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, trainer: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with in_fp32(module):
            return self._hook(trainer, module, *args, **kwargs)
