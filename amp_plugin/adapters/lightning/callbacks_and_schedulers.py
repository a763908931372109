"""A Trainer's callbacks that average weights do so in float32; its schedulers sit out skipped steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from amp_plugin.scaling.step_log import StepLog
from amp_plugin.weights.store import convert_to_fp32, in_fp32

_NEVER: Final = sys.maxsize  # batches; no batch index reaches it


def averages_in_fp32(callbacks: Iterable[Any], package: Any) -> ExitStack:
    """Let callbacks that average weights (EMA, SWA) see the model in float32, until the stack is closed.

    They have copied the model before its set-up: the copy becomes float32 too.
    """
    undo = ExitStack()
    kinds = (package.callbacks.WeightAveraging, package.callbacks.StochasticWeightAveraging)
    hooks = [name for name in dir(package.Callback) if name.startswith(("on_train_", "on_validation_"))]
    for callback in callbacks:
        if not isinstance(callback, kinds):
            continue
        for name in hooks:
            if getattr(type(callback), name) is not getattr(package.Callback, name):
                setattr(callback, name, partial(_with_model_in_fp32, getattr(callback, name)))
                undo.callback(vars(callback).pop, name, None)
        average = getattr(callback, "_average_model", None)
        if isinstance(average, nn.Module):
            convert_to_fp32(average)
    return undo


def _with_model_in_fp32(hook: Callable[..., Any], trainer: Any, module: nn.Module, *args: Any) -> Any:
    with in_fp32(module):
        return hook(trainer, module, *args)


class HeldSchedulers:
    """The schedulers that the Trainer steps after optimizer steps; they sit out skipped ones.

    The Trainer steps a scheduler where ``(batch_idx + 1) % config.frequency == 0``: a frequency that no batch
    index reaches holds it back. Nothing is set on the scheduler itself, whose ``state_dict()`` is saved.
    """

    def __init__(self) -> None:
        self._configs: list[tuple[Any, int]] = []  # with their own frequencies

    def take(self, configs: Iterable[Any], log: StepLog) -> None:
        """Take charge of the Trainer's LRSchedulerConfigs, and of no others any more.

        The log waits for the steps of optimizers whose scheduler is not stepped after each.
        """
        for config, frequency in self._configs:
            config.frequency = frequency
        self._configs = [
            (config, config.frequency)
            for config in configs
            if config.interval == "step" and not config.reduce_on_plateau
        ]
        for config, frequency in self._configs:
            if frequency != 1:
                log.wait_for(config.scheduler.optimizer)

    def after_step(self, optimizer: Optimizer, log: StepLog) -> None:
        """Hold an optimizer's schedulers back, or no more."""
        for config, frequency in self._configs:
            if config.scheduler.optimizer is optimizer:
                config.frequency = _NEVER if log.holds_schedulers(optimizer) else frequency
