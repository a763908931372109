"""A Trainer's callbacks that average weights do so in float32; its schedulers sit out skipped steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from amp_plugin.scaling.step_log import StepLog
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
_NEVER: Final = sys.maxsize  # batches; no batch index reaches it


class Averages:
    """The callbacks of a run that average weights (EMA, SWA), which copy the model before set-up."""

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


class HeldSchedulers:
    """The schedulers that the Trainer steps after optimizer steps; they sit out skipped ones.

    The Trainer steps a scheduler where ``(batch_idx + 1) % config.frequency == 0``: a frequency that no batch
    index reaches holds it back. Nothing is set on the scheduler itself, whose ``state_dict()`` is saved.
    """

    def __init__(self) -> None:
        self._configs: list[Any] = []
        self._frequencies: dict[int, int] = {}  # of those that are held

    def take(self, configs: Iterable[Any], log: StepLog) -> None:
        """Take charge of the Trainer's LRSchedulerConfigs, and of no others any more.

        The log waits for the steps of optimizers whose scheduler is not stepped after each.
        """
        for config in self._configs:
            config.frequency = self._frequencies.pop(id(config), config.frequency)
        self._configs = [
            config for config in configs if config.interval == "step" and not config.reduce_on_plateau
        ]
        for config in self._configs:
            if config.frequency != 1:
                log.wait_for(config.scheduler.optimizer)

    def after_step(self, optimizer: Optimizer, log: StepLog) -> None:
        """Hold an optimizer's schedulers back, or no more."""
        held = log.holds_schedulers(optimizer)
        for config in self._configs:
            if config.scheduler.optimizer is optimizer:
                if held and config.frequency != _NEVER:
                    self._frequencies[id(config)], config.frequency = config.frequency, _NEVER
                elif not held and config.frequency == _NEVER:
                    config.frequency = self._frequencies.pop(id(config))
