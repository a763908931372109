"""Skipped steps of an optimizer, counted for its schedulers although the host may learn of them late."""

from __future__ import annotations

from collections import deque

from amp_plugin.scaling.step_result import StepResult


class LateSkips:
    """The skips of one optimizer: each holds its schedulers back once, as soon as it is known.

    A step whose result the host knows holds them back itself. Where the host does not know yet (a
    fused optimizer on a GPU), the result waits, in order; if it turns out to be a skip, a later step
    that was taken holds the schedulers back instead. So after as many steps they stand where they should::

        after_step(result):  owed += the waiting results that are known by now to be skips, up to the
                                     first that is not known
                             wait for result if it is not known
                             held = result is a skip, else owed-- > 0
    """

    def __init__(self) -> None:
        self._waiting: deque[StepResult] = deque()
        self._owed = 0

    def after_step(self, result: StepResult, *, wait: bool = False) -> bool:
        """Note a step, and return whether the optimizer's schedulers are held back for it.

        Args:
            result: what became of the step.
            wait: wait for the device to know at once, a host sync.
        """
        self._owed += self._learned()
        skipped = result.skipped if wait else result.skipped_if_known()
        if skipped is None:
            self._waiting.append(result)
        if skipped or not self._owed:
            return bool(skipped)
        self._owed -= 1
        return True

    def _learned(self) -> int:
        """Count the earlier steps known only now to have been skipped."""
        skips = 0
        while self._waiting and (skipped := self._waiting[0].skipped_if_known()) is not None:
            self._waiting.popleft()
            skips += skipped
        return skips
