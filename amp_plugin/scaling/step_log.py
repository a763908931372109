"""StepResult, the result of one optimizer step, and StepLog, which counts the steps of a scaler.

::

    add(step)   counts a step on the device, and queues it until the host knows whether it was skipped.
    read()      takes steps from the queue, in order, once the host knows whether they were skipped. read()
                also counts skips in a row, and calls subscribers such as adapters and the run report.

On the CPU the host knows at once whether a step was skipped. On a GPU, the host does not know immediately
whether a fused or one-pass step was skipped. The step then stays in the queue until a later step is added,
``update()`` is called, or a caller waits for the device.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.overflows import FINDS_THE_OP, FirstModules, OverflowReport

RUN = 50
"""After this many skipped steps in a row there is a warning."""

_MOST_LATE = 256  # maximum length of the queue of unread steps, on devices without events

_AT_FLOOR = (
    "gradients overflowed although the loss scale is at min_scale: lowering it further does not help. Look "
    "at last_step(optimizer).overflow_report(), lower min_scale, or use bfloat16."
)

_NUMBERS = ("norm", "used_norm", "found_inf", "judged", "_scale_before")  # attributes of a result

_NOTHING_TO_DO = "the optimizer's own step (nothing was to be unscaled, clipped or checked)"


class StepResult:
    """The result of one ``scaler.step(optimizer)``.

    A result owns its tensors, so later steps do not change it. If a CUDA graph captured the step, the result
    shows the latest replay. Reading :attr:`norm` and :attr:`found_inf` does not wait for the device. Other
    properties of the result wait for the device when they are first read.

    Attributes:
        norm: The norm of the unscaled gradients before the first clip (float32, 0-dim). None if the
            optimizer had no gradients, or if a disabled scaler with ``on_nonfinite="ignore"`` did not
            measure them.
        found_inf: 1.0 if the step was skipped, else 0.0 (float32, 0-dim).
        used_norm: The norm of the gradients at the start of the step, after earlier clips but before the clip
            of ``clip_and_step``. None if it is unknown.
        max_norm: The ``max_norm`` of ``clip_and_step``; None if the step itself did not clip.
        how: A description of how the step was taken and, if it was not taken in one pass, why not.
        one_pass: True if it was taken in one pass.
        judged: The result of ``judge_step_`` (float32, ``[6]``); None if ``on_spike`` is not set.
        optimizer: A function that returns the optimizer, or None if the optimizer no longer exists.
            ``optimizer``, ``name``, ``number`` and ``in_a_row`` are set when the host knows whether the step
            was skipped.
        name: The number of the optimizer and the name of its class, separated by a colon. The optimizer that
            stepped first has number 0.
        number: The number of the step, counted from 1 for each optimizer in this run.
        in_a_row: The number of consecutive skipped steps of the optimizer, up to and including this step.
        time: The time of the step, in seconds since 1970.
    """

    def __init__(
        self,
        *,
        norm: Tensor | None = None,
        used_norm: Tensor | None = None,
        max_norm: float | None = None,
        found_inf: Tensor | None = None,
        judged: Tensor | None = None,
        scale_before: Tensor | None = None,
        report: Callable[..., OverflowReport] = OverflowReport,
        flags: Sequence[Tensor] = (),
        scale_after: Sequence[Tensor] = (),
        known: bool | None = None,
        how: str = _NOTHING_TO_DO,
        one_pass: bool = False,
    ) -> None:
        self.norm = norm
        self.used_norm, self.max_norm = used_norm, max_norm
        self.how, self.one_pass = how, one_pass
        self.found_inf = found_inf = torch.zeros((), device="cpu") if found_inf is None else found_inf
        self.judged = judged
        self._scale_before = scale_before
        self._scale_after = scale_after  # the next update fills it
        self._report, self._flags = report, flags
        self._modules: FirstModules | None = None  # if hooks on modules were on
        self.optimizer: Callable[[], Any] = lambda: None
        self.name, self.number, self.in_a_row, self.time = "", 0, 0, time.time()
        known = self.known_at_once(found_inf) if known is None else known
        told = found_inf if judged is None else judged  # the first number of both is found_inf
        # Whether the step was skipped. If the host does not know that yet, the CUDA event that says when a
        # copy of ``found_inf`` is complete, and the copy.
        self._outcome = copy_to_host([told]) if known is None else known

    @staticmethod
    def known_at_once(found_inf: Tensor) -> bool | None:
        """Return whether a step is skipped; None if ``found_inf`` is not on the CPU."""
        on_host = found_inf.device.type == "cpu" and not capturing(found_inf.device)
        return bool(found_inf.item() > 0) if on_host else None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        known = self.skipped_if_known()
        return bool(self.found_inf.item() > 0) if known is None else known

    def skipped_if_known(self) -> bool | None:
        """Return whether the step was skipped; None if the host would have to wait for the answer."""
        if isinstance(self._outcome, bool):
            return self._outcome
        events, copies = self._outcome
        if not (events and events[0].query()):
            # A replay of a CUDA graph may change ``found_inf`` of a captured step, so read it each time.
            return self.known_at_once(self.found_inf)
        self._outcome = bool(copies[0].reshape(-1)[0].item() > 0)
        self.judged = None if self.judged is None else copies[0]
        return self._outcome

    @property
    def verdict(self) -> str:
        """What happened to the step, in one word.

        ``"landed"`` means that the step was taken. ``"overflow"`` and ``"nan"`` mean that the step was
        skipped because a gradient was inf or nan. ``"spike"`` means that ``on_spike`` skipped or clipped the
        step. ``"held"`` means that the step was skipped because the error of an earlier spike has not been
        raised yet.
        """
        code = 0 if self.judged is None else int(self.judged[2].item())
        if code or not self.skipped:
            return ("landed", "spike", "held")[code]
        return "nan" if self.norm is not None and bool(self.norm.isnan().item()) else "overflow"

    @property
    def is_left_out(self) -> bool:
        """Whether the step was skipped because it was a spike, although its gradients were finite."""
        return self.skipped and self.judged is not None and self.judged[2].item() > 0

    @property
    def is_scaled(self) -> bool:
        """Whether the loss was scaled."""
        return self._scale_before is not None

    @property
    def scale_before(self) -> float:
        """The loss scale by which the loss was multiplied."""
        return 1.0 if self._scale_before is None else float(self._scale_before.item())

    @property
    def scale_after(self) -> float:
        """The loss scale after the next update, or ``scale_before`` until that update is applied."""
        value = self.scale_later()()
        return 1.0 if value is None else float(value.item())

    def scale_later(self) -> Callable[[], Tensor | None]:
        """Return a function that returns ``scale_after`` as a tensor and keeps no other tensor alive."""
        before, after = self._scale_before, self._scale_after
        return lambda: after[0] if after else before

    @property
    def clipped_norm(self) -> Tensor | None:
        """The norm of the gradients that the step used, after all clipping."""
        used = self.norm if self.used_norm is None else self.used_norm
        if used is None or self.max_norm is None:
            return used
        factor: Tensor = torch.ops.amp_plugin.clip_factor(used, self.max_norm, None, self.found_inf)
        return used * factor

    def to_host(self) -> tuple[Sequence[torch.Event], StepResult]:
        """Queue copies of the numbers to the host. Nothing waits or launches a kernel.

        Returns:
            CUDA events that signal when the copies are complete, and a StepResult that contains the copies.
            Once the copies are complete, reading that StepResult does not wait for the device.
        """
        names = [name for name in _NUMBERS if getattr(self, name) is not None]
        flags = self._flags if self.skipped else ()
        events, copies = copy_to_host([*(getattr(self, name) for name in names), *flags])
        twin = copy.copy(self)
        vars(twin).update(zip(names, copies, strict=False), _flags=copies[len(names) :])
        return events, twin

    @property
    def kind(self) -> str:
        """The name of the optimizer's class, for messages."""
        return self.name.partition(": ")[2]

    def note_turn(self, optimizer: Callable[[], Any], name: str, number: int, in_a_row: int) -> None:
        """Set the step's optimizer and the step's number. The log calls this method."""
        self.optimizer, self.name, self.number, self.in_a_row = optimizer, name, number, in_a_row

    def add_modules(self, modules: FirstModules) -> None:
        """Add to the result the first modules in which hooks found an inf or nan during this step."""
        self._modules = modules

    def overflow_report(self) -> OverflowReport:
        """Return the names of the parameters whose gradients were inf or nan, and the possible cause.

        If hooks were registered on the modules, the report also names the first module with an inf or nan. A
        run report or AmpMonitor registers hooks on the modules after a skipped step.
        """
        report = self._report(self._flags) if self._flags else self._report()
        modules = self._modules
        if self.judged is not None and self.is_left_out:
            value, limit = self.judged[3:5].tolist()
            return OverflowReport(spike=f"{value:.5g} above the limit {limit:.5g}")
        if report:
            scaled = self.scale_before > 1.0 and not (modules and modules.forward)
            return replace(report, scaled=scaled, modules=modules)
        if self.skipped:
            return OverflowReport(elsewhere=True, modules=modules)
        not_finite = self.norm is not None and not bool(torch.isfinite(self.norm))
        return OverflowReport(unattributed=True) if not_finite else report

    def __repr__(self) -> str:
        """Show the numbers. The host waits for the device."""
        norm = None if self.norm is None else self.norm.item()
        return (
            f"StepResult(skipped={self.skipped}, norm={norm}, scale_before={self.scale_before}, "
            f"scale_after={self.scale_after})"
        )


def _first_skip(step: StepResult) -> str:
    """Return the warning about the first skipped step of a run without a loss scale.

    It does not wait for the device. On a GPU the overflow flags are not known yet, so the warning does not
    name parameters.
    """
    why = "last_step(optimizer).overflow_report() names the gradients that were not finite"
    if step.found_inf.is_cpu:
        why = step.overflow_report().summary()
    return (
        f"step {step.number} of {step.kind} was skipped, and nothing is scaled: {why}. Run `amp-plugin "
        "diagnose train.py`: it names the op and its line. Later skips are counted without a warning"
    )


def run_of_skips(step: StepResult) -> str:
    """Return a message about the number of skipped steps in a row, their cause, and what to do."""
    steps = f"{step.in_a_row} step{'s' * (step.in_a_row > 1)} of {step.kind}"
    if step.is_left_out:
        return (
            f"{steps} in a row were skipped, the last one as a spike by on_spike=. If its value is "
            "ordinary by now, raise sigma, or leave on_spike out."
        )
    report = step.overflow_report()
    # A high loss scale causes inf, not nan.
    report = replace(report, scaled=report.scaled and not report.nan)
    why = "although nothing is scaled"
    if step.is_scaled:
        further = "" if report.scaled else ": lowering it further will not help"
        why = f"and the loss scale is {step.scale_after:.10g}{further}"
    where = f"{report.where()} ".lstrip()
    meaning = report.meaning()
    text = f"{steps} in a row were skipped ({report.summary()}), {why}. {meaning} {where}"
    return text.rstrip() if FINDS_THE_OP in meaning else text + FINDS_THE_OP


def copy_to_host(tensors: Sequence[Tensor]) -> tuple[Sequence[torch.Event], list[Tensor]]:
    """Queue copies of CUDA and XPU tensors to the host. Other tensors are returned as they are.

    Returns:
        The events and the copies. There is one event for each device, which signals when the copies from that
        device are complete. Nothing is copied while a CUDA graph is captured.
    """
    copies = list(tensors)
    events: dict[torch.device, torch.Event] = {}
    for place, tensor in enumerate(tensors):
        device = tensor.device
        if device.type in {"cuda", "xpu"} and not capturing(device):
            copies[place] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copies[place].copy_(tensor.reshape(tensor.shape), non_blocking=True)
            events[device] = events.get(device) or torch.Event(device)
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))  # not the stream of the current device
    return list(events.values()), copies


Subscriber = Callable[[StepResult], None]


def _ignore(_: object) -> None:
    """Do nothing."""


def reference_to(optimizer: Optimizer, gone: Callable[[Any], object] | None = None) -> Any:
    """Return a weak reference to an optimizer, or a strong one if its class does not allow weak ones."""
    try:
        return weakref.ref(optimizer, gone)
    except TypeError:
        return lambda: optimizer


class _Record:
    """The counts of one optimizer."""

    def __init__(self, optimizer: Optimizer, place: int) -> None:
        self.optimizer, self.name = reference_to(optimizer), f"{place}: {type(optimizer).__name__}"
        self.exact = False
        self.steps = 0  # the number of steps that were read
        self.start_over()

    def start_over(self) -> None:
        """Forget all skips."""
        self.skipped: Tensor | None = None  # float32, 0-dim, on the device
        self.in_a_row = 0
        # The number of known skipped steps for which learning rate schedulers have not been held back yet.
        self.owed = 0
        self.is_held = False

    def count(self, found: Tensor, *, skipped: bool | None) -> None:
        """Count a step.

        ``found`` is 1 if the step is skipped; ``skipped`` is None if the host does not know that yet.
        """
        if self.skipped is None:
            self.skipped = torch.zeros_like(found)
        if skipped is not False:
            self.skipped = self.skipped.to(found.device)
            # The addition is in place, so that each replay of a captured CUDA graph counts its step.
            self.skipped.add_(found)

    def learn(self, *, skipped: bool) -> None:
        """Count a step after the host has learned whether it was skipped."""
        self.steps += 1
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.owed += skipped

    def hold(self) -> None:
        """Hold the learning rate schedulers back once, if there have been more skipped steps than holds."""
        self.is_held = self.owed > 0
        self.owed -= self.is_held

    def total(self) -> int:
        """Return the number of skipped steps. The host waits for the device."""
        return 0 if self.skipped is None else int(self.skipped.item())


_followers: list[Callable[[StepLog], None]] = []


@contextmanager
def new_logs(follower: Callable[[StepLog], None]) -> Iterator[None]:
    """Inside the block, call ``follower`` with the StepLog of each new scaler."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


class StepTotals:
    """Counts the steps and the skipped steps in all logs of a process, including deleted logs.

    A StepTotals keeps no log, optimizer or gradient alive, only 0-dim tensors. Only the method ``told`` waits
    for the device.
    """

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Forget all steps."""
        self._steps = self._skipped = 0
        self._logs: weakref.WeakSet[StepLog] = weakref.WeakSet()
        # ``found_inf`` of steps that were still in the queue of a log when the log was deleted.
        self._late: list[Tensor] = []
        self._scale: Callable[[], Tensor | None] = lambda: None

    def follow(self, log: StepLog) -> None:
        """Count the steps of a log."""
        self._logs.add(log)
        log.subscribe(self._count, first=True)
        log.at_end(self._note_late)

    def _count(self, step: StepResult) -> None:
        self._steps += 1
        self._skipped += step.skipped
        self._scale = step.scale_later()

    def _note_late(self, late: Iterable[StepResult]) -> None:
        for step in late:
            self._late.append(step.found_inf)
            self._scale = step.scale_later()

    def told(self, *, wait: bool) -> tuple[int, int, float | None]:
        """Return the number of steps, the number of skipped steps, and the last loss scale or None.

        If ``wait`` is True, the host waits for the device. If ``wait`` is False, steps whose outcome the host
        does not know yet are not counted.
        """
        steps, skipped, late, scale = self._steps, self._skipped, list(self._late), self._scale
        for log in list(self._logs):
            for step in log.unread_steps():
                late.append(step.found_inf)
                scale = step.scale_later()
        if wait:
            steps += len(late)
            skipped += sum(bool(found.item() > 0) for found in late)
        value = scale()
        is_readable = value is not None and (wait or value.is_cpu)
        return steps, skipped, float(value.item()) if value is not None and is_readable else None


class StepLog:
    """The log of the steps of a scaler's optimizers.

    The log counts steps, queues them until the host knows whether they were skipped, and calls subscribers.
    """

    def __init__(self, skipped_before: int = 0) -> None:
        # The skip count that was taken over from a loaded state dict, a copied scaler or deleted optimizers.
        self.skipped_before = skipped_before
        # True once a step was captured in a CUDA graph. Replays of the graph do not call subscribers.
        self.has_captured = False
        self._records: dict[int, _Record] = {}
        self._met = 0  # the number of optimizers seen so far, including deleted ones
        self._late: deque[tuple[_Record, StepResult]] = deque()  # unread steps
        self._waits = False  # True to wait for the device after each step
        self._subscribers: list[Subscriber] = []
        # Functions that are called with each loss. If there are any, the host waits after each step.
        self._hearers: list[Callable[[Any], None]] = []
        self._has_taken = False  # True once this training run has taken a step
        # True once the log has warned that a step was skipped although loss scaling is off.
        self._has_warned = False
        # The last skipped step of a run that has skipped all its steps so far, else None.
        self._last_skip: StepResult | None = None
        for follower in _followers:
            follower(self)

    def add(self, optimizer: Optimizer, result: StepResult) -> None:
        """Count a step (as skipped if ``result.found_inf`` is 1), and read the queue."""
        record = self._record_of(optimizer)
        found = result.found_inf
        record.count(found, skipped=result.skipped_if_known())
        if capturing(found.device):
            self.has_captured = True
        else:
            self._late.append((record, result))
        try:
            self.read(wait=self._waits or record.exact or len(self._late) > _MOST_LATE)
        finally:
            record.hold()
        # If functions have subscribed to losses, wait for the device, but only after ``hold()``.
        # A wait before ``hold()`` would hold back learning rate schedulers one step too early.
        if self._hearers:
            self.read(wait=True)

    def note_loss(self, loss: Any) -> None:
        """Pass a loss, before it is scaled, to the functions that subscribed to losses."""
        for hear in list(self._hearers):
            hear(loss)

    def start_over(self, skipped_before: int) -> None:
        """Set the skip count, and forget all steps. Settings of ``wait_for`` are kept."""
        self.skipped_before = skipped_before
        self._late.clear()
        for record in self._records.values():
            record.start_over()

    def read(self, *, wait: bool = False) -> None:
        """Read, in order, the steps whose outcome the host knows; with ``wait``, read all steps."""
        while self._late and (wait or self._late[0][1].skipped_if_known() is not None):
            self._learn(*self._late.popleft())

    def at_end(self, call: Callable[[Iterable[StepResult]], None]) -> None:
        """Call ``call`` with the unread steps when this log is garbage-collected."""
        late = self._late
        finalizer: Any = weakref.finalize(self, lambda: call(result for _, result in late))
        finalizer.atexit = False

    def unread_steps(self) -> list[StepResult]:
        """Return, in order, the steps whose outcome the host does not know yet."""
        return [result for _, result in self._late]

    def end_run(self, warn: Callable[[str], Any] | None = warn_user) -> None:
        """End a training run. With ``warn``, wait for the device, and warn if all steps were skipped."""
        self.read(wait=warn is not None)
        last, self._last_skip, self._has_taken = self._last_skip, None, False
        if last is not None and warn is not None:
            warn(f"the run has ended and no optimizer step was taken: {run_of_skips(last)}")

    def subscribe(self, subscriber: Subscriber, *, first: bool = False) -> None:
        """Call ``subscriber`` with each step, once the host knows whether the step was skipped.

        With ``first``, call ``subscriber`` before the other subscribers.
        """
        self._subscribers.insert(0 if first else len(self._subscribers), subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling ``subscriber``."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    @contextmanager
    def watched(self, watcher: Subscriber = _ignore, hear: Callable[[Any], None] = _ignore) -> Iterator[None]:
        """Inside the block, call ``watcher(step)`` right after each step, and ``hear(loss)`` for each loss.

        Inside the block the host waits for the device after each step. A watcher does
        not change after which steps learning rate schedulers are held back.
        """
        self.subscribe(watcher, first=True)
        self._hearers.append(hear)
        try:
            yield
        finally:
            self._hearers.remove(hear)
            self.unsubscribe(watcher)

    def _learn(self, record: _Record, result: StepResult) -> None:
        skipped = result.skipped
        record.learn(skipped=skipped)
        result.note_turn(record.optimizer, record.name, record.steps, record.in_a_row)
        self._has_taken |= not skipped
        self._last_skip = None if self._has_taken else result
        if skipped and not (result.is_scaled or self._has_warned or result.is_left_out):
            self._has_warned = True
            warn_user(_first_skip(result))
        if record.in_a_row == RUN:
            warn_user(run_of_skips(result))
        for subscriber in list(self._subscribers):
            subscriber(result)

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return the number of skipped steps of one optimizer, or of all optimizers if ``optimizer`` is None.

        The host waits for the device.
        """
        if optimizer is not None:
            record = self._records.get(id(optimizer))
            return 0 if record is None else record.total()
        return self.skipped_before + sum(record.total() for record in self._records.values())

    def holds_schedulers(self, optimizer: Optimizer) -> bool:
        """Return True if learning rate schedulers must not advance after the optimizer's last step."""
        record = self._records.get(id(optimizer))
        return record is not None and record.is_held

    def wait_for(self, optimizer: Optimizer | None = None) -> None:
        """From now on, wait for the device after each step of this optimizer; None means every optimizer."""
        if optimizer is None:
            self._waits = True
        else:
            self._record_of(optimizer).exact = True

    def _record_of(self, optimizer: Optimizer) -> _Record:
        record = self._records.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            # Keep the skip count of a deleted optimizer that had the same id as this optimizer.
            self.skipped_before += 0 if record is None else record.total()
            self._met += 1
            record = self._records[id(optimizer)] = _Record(optimizer, self._met - 1)
        return record


def raise_for_nonfinite(blameless_scale: float) -> Subscriber:
    """Return a subscriber that raises FloatingPointError if a step overflows at or below this loss scale."""

    def look(step: StepResult) -> None:
        if not step.skipped or step.is_left_out or step.scale_before > blameless_scale:
            return
        report = step.overflow_report()
        scaled = "" if step.scale_before == 1.0 else f" at a loss scale of {step.scale_before:.10g}"
        msg = (
            f"{step.kind}: gradients are not finite{scaled} ({report.summary()}); the step was not taken, "
            f"the weights are those of before. {report.meaning()} {report.where()} "
            "on_nonfinite='skip' goes on without such steps."
        )
        raise FloatingPointError(msg)

    return look


def tell_of_floor(floor: float, *, raises: bool) -> Subscriber:
    """Return a subscriber that raises or warns if a step overflows at the smallest loss scale allowed."""
    untold = [_AT_FLOOR]

    def look(step: StepResult) -> None:
        overflowed = step.skipped and not step.is_left_out
        if not (untold and overflowed and step.is_scaled and step.scale_before <= floor):
            return
        if raises:
            raise FloatingPointError(_AT_FLOOR)
        warn_user(f"{untold.pop()} Such steps are skipped, and on_min_scale='raise' ends the run.")

    return look
