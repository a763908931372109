"""A skipped step run again, to explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.options import whole
from amp_plugin.scaling.step_log import LoggedStep, RecordedCall, StepLog, StepResult, random_numbers_from


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A skipped step that can be run once more: same batches, random numbers and weights.

    The weights are those of the step because it changed none. What forward passes write themselves, as
    the running statistics of batch norm, is not put back.

    Attributes:
        optimizer: Whose step was skipped.
        result: Its result.
        in_a_row: How many of its steps were skipped one after the other.
        calls: The forward and backward passes of its accumulation window.
        params: Parameters whose gradients are set aside meanwhile.
    """

    optimizer: Optimizer
    result: StepResult
    in_a_row: int
    calls: Sequence[RecordedCall]
    params: Sequence[Tensor]

    def run(self) -> None:
        """Run the passes again, without a step; gradients and random states are as before afterwards."""
        with gradients_set_aside(self.params):
            for recorded in self.calls:
                with random_numbers_from(recorded.random_state):
                    recorded.call()


@contextmanager
def gradients_set_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Begin a block without gradients, and put those of before back."""
    before = [(param, param.grad) for param in params]
    for param, _ in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad


T = TypeVar("T")
Explainer = Callable[[Replay], str]
"""Runs a skipped step again, under whatever it likes, and returns what it has found."""


def explain(
    log: StepLog, step: LoggedStep, explainer: Callable[[Replay], T], params: Iterable[Tensor]
) -> T | None:
    """Return what ``explainer`` finds in a step that was just skipped; None if no call was remembered."""
    optimizer, calls, result = step.optimizer(), tuple(log.calls), step.result
    if optimizer is None or not calls:
        return None
    before, log.replaying = log.replaying, True
    try:
        again = Replay(
            optimizer=optimizer, result=result, in_a_row=step.in_a_row, calls=calls, params=list(params)
        )
        return explainer(again)
    finally:
        log.replaying = before


def explain_once(
    log: StepLog, explainer: Explainer, after: int, params: Callable[[], Iterable[Tensor]]
) -> None:
    """Explain the first run of ``after`` skipped steps of one optimizer, in a warning."""
    if whole("after", after) < 2:  # the calls of a step are remembered once one was skipped
        msg = f"after={after!r} is not allowed; give at least 2 skipped steps in a row"
        raise ValueError(msg)

    def look(step: LoggedStep) -> None:
        if step.in_a_row != after or log.replaying or not log.calls or step.optimizer() is None:
            return
        log.unsubscribe(look)
        text = explain(log, step, explainer, params())
        warn_user(f"{step.run_of_skips()} The last was run once more:\n{text}")

    log.subscribe(look)
