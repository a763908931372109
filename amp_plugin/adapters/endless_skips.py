"""End a run that only skips, with its cause: it trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from amp_plugin.scaling.replay import Replay
from amp_plugin.scaling.skips_in_a_row import ReadStep, SkipsInARow
from amp_plugin.scaling.step_result import StepResult


class EndlessSkips(SkipsInARow):
    """Counts skipped steps, and raises where too many of one optimizer come in a row.

    Args:
        limit: skipped steps in a row that end the run; 0: never.
        in_fp16: what else to try where a loss was scaled, for the error's text.
        option: how a program writes the limit, for its end.
    """

    def __init__(self, limit: int, *, in_fp16: str, option: str) -> None:
        super().__init__()
        self.limit = limit
        self._in_fp16, self._option = in_fp16, option

    def results(self, *, wait: bool, explain: Callable[[ReadStep], str]) -> Iterator[StepResult]:
        """Read the results in order, and yield them.

        Args:
            wait: wait for the device; else read up to the first result that the host does not know yet.
            explain: runs the step once more that ends the run, and returns what it has found.

        Raises:
            RuntimeError: the limit is reached; the text names the parameters.
        """
        for step in self.read(wait=wait):
            if step.in_a_row and step.in_a_row == self.limit:
                raise RuntimeError("\n\n".join(filter(None, [self._text(step), explain(step)])))
            yield step.result

    def _text(self, step: ReadStep) -> str:
        result, report = step.result, step.result.overflow_report()
        if result.is_scaled:
            why = f"because gradients overflowed (loss scale {result.scale_after:g}; {report.summary()})"
            else_try = f"{self._in_fp16}, or"
        else:
            why = f"because gradients are not finite ({report.summary()}), although nothing is scaled"
            else_try = "or"
        return (
            f"{step.in_a_row} optimizer steps in a row were skipped {why}. {report.meaning()} Look for nan "
            f"in the loss or the data, {else_try} raise {self._option}"
        )


def explanation(replay: Replay, model: Any) -> str:
    """Run a skipped step once more under ``diagnose``, and return what was found; empty if none was recorded.

    Args:
        replay: the step.
        model: gives the names of modules; None: whatever module is called.
    """
    if not replay.calls:
        return ""
    from amp_plugin.numerics.diagnose import diagnose_skip  # noqa: PLC0415 -- loaded where a run has failed

    return f"The last of them was run once more:\n{diagnose_skip(replay, model)}"
