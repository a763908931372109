"""What schedulers are told: which optimizers skipped their step in the present iteration."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_plugin.scaling.step_result import StepResult


class SkipLedger:
    """The skips of one iteration, told truthfully and without waiting for the device.

    An iteration is over when an optimizer steps that has already stepped in it: so a skip is told
    until then, and never of an optimizer that did not step. A skip that the host does not know yet
    (a fused optimizer on a GPU) is told with a later step that was taken, so that a scheduler is
    held back once per skip::

        stepped(key, result):  forget the iteration if key has stepped in it
                               owed[key] += earlier steps of key that turned out to be skipped
                               told[key] = result is known to be skipped, else owed[key]-- > 0

    Args:
        exact: wait for the device instead, at each step.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._told: dict[int, bool] = {}
        self._unknown: dict[int, deque[StepResult]] = {}
        self._owed: dict[int, int] = {}

    def stepped(self, key: int, result: StepResult) -> None:
        """Note a step.

        Args:
            key: identity of the optimizer.
            result: what became of its step.
        """
        if key in self._told:
            self._told.clear()
        owed = self._owed.get(key, 0) + self._late_skips(key)
        skipped = result.skipped if self._exact else result.skipped_if_known()
        if skipped is None:
            self._unknown.setdefault(key, deque()).append(result)
        pays = not skipped and owed > 0
        self._owed[key] = owed - pays
        self._told[key] = bool(skipped) or pays

    def _late_skips(self, key: int) -> int:
        """Count the steps known by now to have been skipped, in the order they were taken."""
        waiting = self._unknown.get(key, deque())
        late = 0
        while waiting and (skipped := waiting[0].skipped_if_known()) is not None:
            waiting.popleft()
            late += skipped
        return late

    def skipped(self, key: int) -> bool:
        """Return whether a scheduler of this optimizer is to be held back in this iteration."""
        return self._told.get(key, False)
