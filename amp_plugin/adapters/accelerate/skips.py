"""Which optimizers skipped their step in the present iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from amp_plugin.adapters.endless_skips import EndlessSkips
from amp_plugin.adapters.late_skips import LateSkips
from amp_plugin.scaling.skips_in_a_row import ReadStep
from amp_plugin.scaling.step_result import StepResult

_IN_FP16, _OPTION = "use mixed_precision='bf16'", "AmpKwargs(max_skips_in_a_row=...)"


class SkipLedger:
    """The skips of one iteration, known without waiting for the device.

    An iteration is over when an optimizer steps that has already stepped in it: so a skip counts
    until then, and never for an optimizer that did not step.

    Args:
        exact: wait for the device instead, at each step.
        max_in_a_row: skipped steps of one optimizer in a row that end the run; 0: never.
        explain: returns what running the last of them again has shown.
    """

    def __init__(
        self, *, exact: bool, max_in_a_row: int = 0, explain: Callable[[ReadStep], str] = lambda _: ""
    ) -> None:
        self._explain = explain
        self._exact = exact
        self._endless = EndlessSkips(max_in_a_row, in_fp16=_IN_FP16, option=_OPTION)
        self._told: dict[int, bool] = {}
        self._late_skips: dict[int, LateSkips] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the steps: those were of optimizers of this process."""
        return _empty_ledger, (self._exact, self._endless.limit)

    def stepped(self, key: int, result: StepResult) -> None:
        """Note a step.

        Args:
            key: identity of the optimizer.
            result: what became of its step.

        Raises:
            RuntimeError: too many in a row were skipped.
        """
        if key in self._told:
            self._told.clear()
        late_skips = self._late_skips.setdefault(key, LateSkips())
        self._told[key] = late_skips.after_step(result, wait=self._exact)
        self._endless.note(key, result)
        deque(self._endless.results(wait=self._exact, explain=self._explain), maxlen=0)

    def going_on(self) -> bool:
        """Whether an optimizer's last step that is known was skipped."""
        return self._endless.going_on()

    def skipped(self, key: int) -> bool:
        """Return whether a scheduler of this optimizer is to be held back in this iteration."""
        return self._told.get(key, False)


def _empty_ledger(exact: bool, max_in_a_row: int) -> SkipLedger:
    return SkipLedger(exact=exact, max_in_a_row=max_in_a_row)
