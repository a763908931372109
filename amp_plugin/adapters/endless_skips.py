"""End a run that only skips, with its cause: it trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from amp_plugin.scaling.step_log import LoggedStep, Replay, StepLog


def refuse_endless_skips(
    step: LoggedStep, limit: int, *, in_fp16: str, option: str, explain: Callable[[LoggedStep], str]
) -> None:
    """Raise where a step is one skip too many.

    Args:
        step: a step that the host knows of now.
        limit: skipped steps of one optimizer in a row that end the run; 0: never.
        in_fp16: what else to try where a loss was scaled, for the error's text.
        option: how a program writes the limit, for its end.
        explain: runs the step once more, and returns what it has found.

    Raises:
        RuntimeError: the limit is reached; the text names the parameters.
    """
    if step.in_a_row and step.in_a_row == limit:
        text = _text(step, in_fp16, option)
        raise RuntimeError("\n\n".join(filter(None, [text, explain(step)])))


def _text(step: LoggedStep, in_fp16: str, option: str) -> str:
    result, report = step.result, step.result.overflow_report()
    if result.is_scaled:
        why = f"because gradients overflowed (loss scale {result.scale_after:g}; {report.summary()})"
        else_try = f"{in_fp16}, or"
    else:
        why = f"because gradients are not finite ({report.summary()}), although nothing is scaled"
        else_try = "or"
    return (
        f"{step.in_a_row} optimizer steps in a row were skipped {why}. {report.meaning()} Look for nan "
        f"in the loss or the data, {else_try} raise {option}"
    )


def explanation(log: StepLog, step: LoggedStep, params: Iterable[Tensor], model: Any) -> str:
    """Run a skipped step once more under ``diagnose``, and return its report; empty if none was recorded.

    Args:
        log: the log that has the step.
        step: the step.
        params: the parameters whose gradients are set aside meanwhile.
        model: gives the names of modules; None: whatever module is called.
    """

    def diagnosed(replay: Replay) -> str:
        from amp_plugin.numerics.diagnose import diagnose_skip  # noqa: PLC0415 -- loaded where a run has failed

        return diagnose_skip(replay, model=model)

    text = log.explain(step, diagnosed, params)
    return "" if text is None else f"The last of them was run once more:\n{text}"
