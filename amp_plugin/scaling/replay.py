"""A skipped step, ready to be run once more, and how its forward and backward passes are remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.skips_in_a_row import ReadStep
from amp_plugin.scaling.step_result import StepResult


class RandomState(NamedTuple):
    """The states of torch's random number generators.

    Attributes:
        cpu: The CPU's.
        cuda: One for each CUDA device; empty if CUDA has not been used.
    """

    cpu: Tensor
    cuda: Sequence[Tensor] = ()

    @classmethod
    def now(cls) -> RandomState:
        """Copy the present states: no host sync."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if used else ())

    def restore(self) -> None:
        """Go on from these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class RecordedCall(NamedTuple):
    """A call that runs forward and backward passes, and the random state that it began with."""

    call: Callable[[], Any]
    random_state: RandomState


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A skipped step that can be run once more: same batches, random numbers and weights.

    The weights are those of the step because it changed none. What forward passes write themselves, as
    the running statistics of batch norm, is not put back.

    Attributes:
        optimizer: Whose step was skipped.
        result: What became of it.
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
        grads, random_state = [param.grad for param in self.params], RandomState.now()
        for param in self.params:
            param.grad = None
        try:
            for recorded in self.calls:
                recorded.random_state.restore()
                recorded.call()
        finally:
            random_state.restore()
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad


Explainer = Callable[[Replay], str]
"""Runs a skipped step again, under whatever it likes, and returns what it has found."""


class Recorder:
    """Remembers the calls of one accumulation window, if at its begin that was wanted."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self._over = True
        self._wanted = False

    def remember(self, call: Callable[[], Any], *, wanted: bool) -> None:
        """Remember a call that is about to run.

        Args:
            call: Runs forward and backward passes.
            wanted: Whether to remember the calls of the window that begins with this one, if one does.
        """
        if self._over:
            self.calls.clear()
            self._over, self._wanted = False, wanted
        if self._wanted:
            self.calls.append(RecordedCall(call, RandomState.now()))

    def replay_of(self, step: ReadStep, optimizer: Optimizer, params: Iterable[Tensor]) -> Replay:
        """Return a skipped step of the window, ready to be run once more; see :class:`Replay`."""
        return Replay(
            optimizer=optimizer,
            result=step.result,
            in_a_row=step.in_a_row,
            calls=tuple(self.calls),
            params=list(params),
        )

    def end_window(self) -> None:
        """Note that a step was taken or skipped: the next call begins a window."""
        self._over = True
