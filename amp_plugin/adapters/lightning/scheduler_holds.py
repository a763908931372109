"""Hold learning-rate schedulers back while optimizer steps are skipped."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from amp_plugin.adapters.late_skips import LateSkips
from amp_plugin.scaling.step_result import StepResult

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
    """Decide after each optimizer step which schedulers sit it out; LateSkips says when.

    Args:
        exact: wait for the device after each step, so that every skip is known at once.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._held: list[Any] = []
        self._skips: defaultdict[int, LateSkips] = defaultdict(LateSkips)

    def clear(self) -> None:
        """Forget all schedulers, for a new run."""
        self._held.clear()
        self._skips.clear()

    def take(self, config: Any, config_class: Any) -> Any:
        """Take charge of a scheduler's config if it is called after optimizer steps.

        Args:
            config: an LRSchedulerConfig of the Trainer.
            config_class: the Trainer's LRSchedulerConfig with HeldBack mixed in.

        Returns:
            A config with the same scheduler, to give to the Trainer in its place.
        """
        if config.interval != "step" or config.reduce_on_plateau:
            return config
        if not isinstance(config, HeldBack):
            config = config_class(**vars(config))
        self._held.append(config)
        return config

    def after_step(self, optimizer: Optimizer, result: StepResult) -> None:
        """Set the holds of an optimizer's schedulers."""
        configs = [config for config in self._held if config.scheduler.optimizer is optimizer]
        if not configs:
            return
        wait = self._exact or any(config.own_frequency != 1 for config in configs)
        hold = self._skips[id(optimizer)].after_step(result, wait=wait)
        for config in configs:
            config.hold = hold
