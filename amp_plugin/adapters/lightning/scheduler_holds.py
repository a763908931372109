"""Hold learning-rate schedulers back while optimizer steps are skipped."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer

from amp_plugin.scaling.step_log import StepLog

NEVER = sys.maxsize


class HeldBack:
    """Mix into LRSchedulerConfig: due at no batch while ``hold`` is set.

    The Trainer calls a scheduler where ``(batch_idx + 1) % config.frequency == 0``, so a
    frequency no batch index reaches holds it back. Nothing is set on the scheduler itself: that
    would enter its ``state_dict()`` and the checkpoint.

    Attributes:
        hold: Whether the scheduler sits out the present optimizer step.
    """

    hold: bool = False
    own_frequency: int = 1

    @property
    def frequency(self) -> int:
        """Batches between two calls of the scheduler; beyond any batch index while held."""
        return NEVER if self.hold else self.own_frequency

    @frequency.setter
    def frequency(self, value: int) -> None:
        self.own_frequency = value


class SchedulerHolds:
    """Let the schedulers that the Trainer calls after optimizer steps sit out skipped ones."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def clear(self) -> None:
        """Forget all schedulers, for a new run."""
        self._held.clear()

    def take(self, config: Any, config_class: Any, log: StepLog) -> Any:
        """Take charge of a scheduler's config if it is called after optimizer steps.

        Args:
            config: an LRSchedulerConfig of the Trainer.
            config_class: the Trainer's LRSchedulerConfig with HeldBack mixed in.
            log: that of the steps; it waits for those whose scheduler is not called after each.

        Returns:
            A config with the same scheduler, to give to the Trainer in its place.
        """
        if config.interval != "step" or config.reduce_on_plateau:
            return config
        if not isinstance(config, HeldBack):
            config = config_class(**vars(config))
        if config.own_frequency != 1:
            log.wait_for(config.scheduler.optimizer)
        self._held.append(config)
        return config

    def after_step(self, optimizer: Optimizer, log: StepLog) -> None:
        """Set the holds of an optimizer's schedulers."""
        for config in self._held:
            if config.scheduler.optimizer is optimizer:
                config.hold = log.holds_schedulers(optimizer)
