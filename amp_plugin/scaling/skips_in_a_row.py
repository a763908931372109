"""Skipped steps in a row, of each optimizer, counted as the host learns of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from amp_plugin.scaling.step_result import StepResult


class ReadStep(NamedTuple):
    """A step whose result is known.

    Attributes:
        key: Identity of the optimizer.
        result: What became of the step.
        in_a_row: How many of the optimizer's steps were skipped one after the other, this one included.
    """

    key: int
    result: StepResult
    in_a_row: int


class SkipsInARow:
    """Results of steps, in order.

    Attributes:
        count: Skipped steps read so far, of all optimizers.
    """

    def __init__(self) -> None:
        self.count = 0
        self._unread: deque[tuple[int, StepResult]] = deque()
        self._in_a_row: dict[int, int] = {}

    def note(self, key: int, result: StepResult) -> None:
        """Note a step of the optimizer with this identity."""
        self._unread.append((key, result))

    def begin_anew(self, count: int = 0) -> None:
        """Forget what was noted; go on from a count."""
        self.count = count
        self._unread.clear()
        self._in_a_row.clear()

    def unread(self) -> int:
        """Return how many results are noted and not read yet."""
        return len(self._unread)

    def going_on(self) -> bool:
        """Whether the last step read of an optimizer was skipped."""
        return any(self._in_a_row.values())

    def read(self, *, wait: bool) -> Iterator[ReadStep]:
        """Read the results in order, and yield them.

        Args:
            wait: Wait for the device; else read up to the first result that the host does not know yet.
        """
        while self._unread and (wait or self._unread[0][1].skipped_if_known() is not None):
            key, result = self._unread.popleft()
            in_a_row = self._in_a_row[key] = self._in_a_row.get(key, 0) + 1 if result.skipped else 0
            self.count += result.skipped
            yield ReadStep(key, result, in_a_row)
