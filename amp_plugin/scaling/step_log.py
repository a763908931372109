"""The log of steps: counts them, learns late what the device has decided, and calls who asked.

::

    add(step)  ->  counted on the device; queued until the host knows whether it was skipped
    read()     ->  for each step known by now, in order: skips in a row, then every subscriber
                   (endless skips, on_nonfinite="raise", explanations, adapters)

On the CPU a step is known at once. On a GPU the flag of a fused or one-pass step is on its way, and the step
is read when a later one is added, at update(), or when a caller waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.options import whole
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.step_result import HostFlag, StepResult
from amp_plugin.user_warnings import warn_user

RUN = 50
"""Skipped steps in a row that are worth a warning."""

# A critic may step a hundred times before a generator's step; torch.amp refuses the second step.
_STEPS_WITHOUT_UPDATE = 200
_MOST_LATE = 256  # on devices that do not say when a flag has arrived

_RandomState = tuple[Tensor, Sequence[Tensor]]  # of the CPU, and of each CUDA device if CUDA has been used


def _random_state() -> _RandomState:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if used else ()


def _restore_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class RecordedCall(NamedTuple):
    """A call that runs forward and backward passes, and the random state that it began with."""

    call: Callable[[], Any]
    random_state: _RandomState


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
        grads, random_state = [param.grad for param in self.params], _random_state()
        for param in self.params:
            param.grad = None
        try:
            for recorded in self.calls:
                _restore_random_state(recorded.random_state)
                recorded.call()
        finally:
            _restore_random_state(random_state)
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad


Explainer = Callable[[Replay], str]
"""Runs a skipped step again, under whatever it likes, and returns what it has found."""


class LoggedStep(NamedTuple):
    """A step whose result the host knows.

    Attributes:
        optimizer: Whose step it was; a weak reference.
        kind: The optimizer's type, for texts.
        result: Its result.
        in_a_row: How many of the optimizer's steps were skipped one after the other, this one included.
    """

    optimizer: weakref.ref[Optimizer]
    kind: str
    result: StepResult
    in_a_row: int


Subscriber = Callable[[LoggedStep], None]


class _Record:
    """What the log keeps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.exact = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all steps."""
        self.skipped: Tensor | None = None  # float32, 0-dim, on the device
        self.since_update = 0
        self.in_a_row = 0
        self.owed = 0  # skips that have not held the schedulers back yet
        self.is_held = False

    def count(self, found: Tensor, *, skipped: bool | None) -> None:
        """Count a step that is skipped where ``found`` is 1; ``skipped`` if the host knows."""
        if self.skipped is None:
            self.skipped = torch.zeros_like(found)
        if skipped is not False:
            self.skipped = self.skipped.to(found.device)
            self.skipped.add_(found)  # in place: a captured step adds at each replay

    def total(self) -> int:
        """Return how many were skipped: a host sync."""
        return 0 if self.skipped is None else int(self.skipped.item())


_Late = tuple[Callable[[], bool | None], Callable[[], bool], Callable[[bool], None]]
# What the host learns later: the flag if it is known, the flag waited for, and what is done then.


class StepLog:
    """The steps of a scaler's optimizers.

    Args:
        skipped_before: Skipped steps that a loaded state or a copied scaler brings along.

    Attributes:
        skipped_before: As given.
        exact: Whether each step waits for the device, so that every skip is known at once.
        replaying: Whether a step is being run again at the moment.
        has_steps: Whether a step was taken or skipped.
        calls: The forward and backward passes of the present window; empty unless steps are being skipped.
    """

    def __init__(self, skipped_before: int = 0) -> None:
        self.skipped_before = skipped_before
        self.exact = False
        self.replaying = False
        self.has_steps = False
        self._records: dict[int, _Record] = {}
        self._late: deque[_Late] = deque()
        self._subscribers: list[Subscriber] = []
        self._warned_of_run: set[int] = set()
        self.calls: list[RecordedCall] = []
        self._window_is_over = True
        self._keeps_calls = False

    def add(self, optimizer: Optimizer, result: StepResult, *, scaled_dynamically: bool) -> None:
        """Count a step, skipped where ``result.found_inf`` is 1, and read what is known by now.

        Args:
            optimizer: Whose step it was.
            result: Its result.
            scaled_dynamically: Whether an update is expected to follow.

        Raises:
            Exception: What a subscriber raises.
        """
        record = self._record_of(optimizer)
        found = result.found_inf
        record.count(found, skipped=result.skipped_if_known())
        self.has_steps = True
        self._window_is_over = True
        record.since_update += 1
        if record.since_update == _STEPS_WITHOUT_UPDATE and scaled_dynamically:
            warn_user(
                f"{record.since_update} steps of {record.kind} without scaler.update(): the loss "
                "scale stays where it is, and if it is too high every step is skipped. Call update() once "
                "per iteration, or make the scaler with dynamic=False."
            )
        if not capturing(found.device):
            learn = partial(self._learn, record, result)
            self._late.append((result.skipped_if_known, lambda: result.skipped, learn))
        try:
            self.read(wait=self.exact or record.exact or len(self._late) > _MOST_LATE)
        finally:
            record.is_held = record.owed > 0
            record.owed -= record.is_held

    def when_known(self, flag: Tensor, then: Callable[[bool], None]) -> None:
        """Call ``then`` with a flag on the device (one element) in its turn, once the host knows it."""
        if not capturing(flag.device):
            on_its_way = HostFlag(flag)
            self._late.append((on_its_way.known, on_its_way.wait, then))

    def note_update(self) -> None:
        """Record that an update was requested."""
        for record in self._records.values():
            record.since_update = 0

    def begin_anew(self, skipped_before: int) -> None:
        """Go on from a count, with no step known and nothing left to learn; who is waited for stays."""
        self.skipped_before = skipped_before
        self._late.clear()
        for record in self._records.values():
            record.begin_anew()

    def read(self, *, wait: bool = False) -> None:
        """Learn, in order, what the host knows by now; with ``wait`` everything, a host sync.

        Raises:
            Exception: What a subscriber raises.
        """
        while self._late and (wait or self._late[0][0]() is not None):
            _, flag, then = self._late.popleft()
            then(flag())

    def unread(self) -> int:
        """Return how many results the host does not know yet."""
        return len(self._late)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with each step, in order, once the host knows it."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` no more."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def _learn(self, record: _Record, result: StepResult, skipped: bool) -> None:
        record.in_a_row = record.in_a_row + 1 if skipped else 0
        record.owed += skipped
        step = LoggedStep(record.optimizer, record.kind, result, record.in_a_row)
        if step.in_a_row == RUN and id(record) not in self._warned_of_run:
            self._warned_of_run.add(id(record))
            warn_user(_all_skipped_text(step))
        for subscriber in list(self._subscribers):
            subscriber(step)

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of one optimizer or (None) of all: a host sync."""
        if optimizer is not None:
            record = self._records.get(id(optimizer))
            return 0 if record is None else record.total()
        return self.skipped_before + sum(record.total() for record in self._records.values())

    def is_skipping(self) -> bool:
        """Whether the last step read of an optimizer was skipped."""
        return any(record.in_a_row for record in self._records.values())

    def holds_schedulers(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's schedulers sit out its last step.

        Each skip holds them back once. One that the host learns of late holds them back at a later step
        instead, so that they stand where they should after as many steps.
        """
        record = self._records.get(id(optimizer))
        return record is not None and record.is_held

    def wait_for(self, optimizer: Optimizer) -> None:
        """Wait for the device after each later step of this optimizer."""
        self._record_of(optimizer).exact = True

    def _record_of(self, optimizer: Optimizer) -> _Record:
        record = self._records.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            self.skipped_before += 0 if record is None else record.total()  # of an optimizer that is gone
            record = self._records[id(optimizer)] = _Record(optimizer)
        return record

    def remember(self, call: Callable[[], Any]) -> None:
        """Remember a call that is about to run forward and backward passes, while steps are being skipped."""
        if self.replaying:
            return
        if self._window_is_over:
            self.calls.clear()
            self._window_is_over, self._keeps_calls = False, self.is_skipping()
        if self._keeps_calls:
            self.calls.append(RecordedCall(call, _random_state()))

    def explain(self, step: LoggedStep, explainer: Explainer, params: Iterable[Tensor]) -> str | None:
        """Return what ``explainer`` finds in a step that was just skipped, once it has run it again.

        Nothing here is changed by that. None if no call was remembered.
        """
        optimizer, calls, result = step.optimizer(), tuple(self.calls), step.result
        if optimizer is None or not calls:
            return None
        before, self.replaying = self.replaying, True
        try:
            again = Replay(
                optimizer=optimizer, result=result, in_a_row=step.in_a_row, calls=calls, params=list(params)
            )
            return explainer(again)
        finally:
            self.replaying = before

    def explain_once(self, explainer: Explainer, after: int, params: Callable[[], Iterable[Tensor]]) -> None:
        """Explain the first run of ``after`` skipped steps of one optimizer, in a warning.

        Raises:
            ValueError: ``after`` is below 2: the calls of a step are remembered once one was skipped.
        """
        if whole("after", after) < 2:
            msg = f"after={after!r} is not allowed; give at least 2 skipped steps in a row"
            raise ValueError(msg)

        def look(step: LoggedStep) -> None:
            if step.in_a_row != after or self.replaying or not self.calls or step.optimizer() is None:
                return
            self.unsubscribe(look)
            text = self.explain(step, explainer, params())
            warn_user(
                f"{step.in_a_row} steps of {step.kind} in a row were skipped "
                f"({step.result.overflow_report().summary()}). The last was run once more:\n{text}"
            )

        self.subscribe(look)


def raise_for_nonfinite(blameless_scale: float) -> Subscriber:
    """Return what raises FloatingPointError for a step skipped at a loss scale of at most this."""

    def look(step: LoggedStep) -> None:
        result = step.result
        if not result.skipped or result.scale_before > blameless_scale:
            return
        report = result.overflow_report()
        scaled = "" if result.scale_before == 1.0 else f" at a loss scale of {result.scale_before:g}"
        msg = (
            f"{step.kind}: gradients are not finite{scaled} ({report.summary()}); the step was not taken, "
            f"the weights are those of before. {report.meaning()} on_nonfinite='skip' goes on without such "
            "steps."
        )
        raise FloatingPointError(msg)

    return look


def _all_skipped_text(step: LoggedStep) -> str:
    result, report = step.result, step.result.overflow_report()
    rest = (
        f"and the loss scale is {result.scale_after:g}. If it still falls, training may recover; else look "
        "for nan in the loss or the data, or use bfloat16."
        if result.is_scaled
        else f"although nothing is scaled. {report.meaning()}"
    )
    return (
        f"{RUN} steps of {step.kind} in a row were skipped: its gradients are not finite "
        f"({report.summary()}), {rest}"
    )
