"""Skipped steps in a row: a run that only skips trains nothing, and is to end with the cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from amp_plugin.scaling.step_result import StepResult


class EndlessSkips:
    """Counts skipped steps, of each optimizer, and raises where too many come in a row.

    Args:
        limit: So many in a row are too many; 0: never.
        remedies: What else to try, the end of the error's text.

    Attributes:
        count: Skipped steps read so far, of all optimizers.
        unread: Results noted and not read yet.
    """

    def __init__(self, limit: int, remedies: str) -> None:
        self.limit = limit
        self.count = 0
        self.unread: deque[tuple[int, StepResult]] = deque()
        self._remedies = remedies
        self._in_a_row: dict[int, int] = {}

    def note(self, key: int, result: StepResult) -> None:
        """Note a step.

        Args:
            key: identity of the optimizer.
            result: what became of its step.
        """
        self.unread.append((key, result))

    def begin_anew(self, count: int = 0) -> None:
        """Forget what was noted; go on from a count."""
        self.count = count
        self.unread.clear()
        self._in_a_row.clear()

    def read(self, *, wait: bool) -> Iterator[StepResult]:
        """Read the results in order, and yield them.

        Args:
            wait: wait for the device; else read up to the first that the host does not know yet.

        Raises:
            RuntimeError: the limit is reached; the text names the parameters.
        """
        while self.unread and (wait or self.unread[0][1].skipped_if_known() is not None):
            key, result = self.unread.popleft()
            in_a_row = self._in_a_row[key] = self._in_a_row.get(key, 0) + 1 if result.skipped else 0
            self.count += result.skipped
            if result.skipped and in_a_row == self.limit:
                raise RuntimeError(self._text(result, in_a_row))
            yield result

    def _text(self, result: StepResult, in_a_row: int) -> str:
        report = result.overflow_report()
        return (
            f"{in_a_row} optimizer steps in a row were skipped because gradients overflowed (loss scale "
            f"{result.scale_after:g}; {report.summary()}). {report.meaning()} Look for nan in the loss or "
            f"the data, {self._remedies}"
        )
