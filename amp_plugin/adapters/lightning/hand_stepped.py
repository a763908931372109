"""Learning-rate schedulers that a program steps itself: in manual optimization, and in Fabric."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from amp_plugin.adapters.late_skips import LateSkips
from amp_plugin.scaling.step_result import StepResult

Value = TypeVar("Value")


class ByOptimizer(weakref.WeakKeyDictionary[Any, Value]):
    """What is known of optimizers as long as they live; copies and pickles start empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ByOptimizer[Value]:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class HandSteppedSchedulers:
    """Whether an optimizer's schedulers sit out its last step; LateSkips says when.

    Costs nothing for optimizers that were never asked about.

    Args:
        exact: wait for the device after each step, so that every skip is known at once.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._skips: ByOptimizer[LateSkips] = ByOptimizer()
        self._held: ByOptimizer[bool] = ByOptimizer()

    def after_step(self, optimizer: Any, result: StepResult) -> None:
        """Note a step."""
        if optimizer in self._skips:
            self._held[optimizer] = self._skips[optimizer].after_step(result, wait=self._exact)

    def are_held(self, optimizer: Any, last_step: Callable[[Any], StepResult]) -> bool:
        """Say whether the optimizer's schedulers sit out its last step.

        Args:
            optimizer: torch's.
            last_step: what became of an optimizer's last step.
        """
        if optimizer not in self._skips:
            self._skips[optimizer] = LateSkips()
            self.after_step(optimizer, last_step(optimizer))
        return self._held[optimizer]
