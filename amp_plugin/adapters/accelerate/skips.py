"""Which optimizers skipped their step in the present iteration."""

from __future__ import annotations

from typing import Any

from amp_plugin.adapters.late_skips import LateSkips
from amp_plugin.scaling.step_result import StepResult


class SkipLedger:
    """The skips of one iteration, told truthfully and without waiting for the device.

    An iteration is over when an optimizer steps that has already stepped in it: so a skip is told
    until then, and never of an optimizer that did not step.

    Args:
        exact: wait for the device instead, at each step.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._told: dict[int, bool] = {}
        self._late_skips: dict[int, LateSkips] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the steps: those were of optimizers of this process."""
        return _empty_ledger, (self._exact,)

    def stepped(self, key: int, result: StepResult) -> None:
        """Note a step.

        Args:
            key: identity of the optimizer.
            result: what became of its step.
        """
        if key in self._told:
            self._told.clear()
        late_skips = self._late_skips.setdefault(key, LateSkips())
        self._told[key] = late_skips.after_step(result, wait=self._exact)

    def skipped(self, key: int) -> bool:
        """Return whether a scheduler of this optimizer is to be held back in this iteration."""
        return self._told.get(key, False)


def _empty_ledger(exact: bool) -> SkipLedger:
    return SkipLedger(exact=exact)
