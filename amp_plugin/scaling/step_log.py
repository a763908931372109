"""The result of a step, and the log that counts steps and learns late what the device has decided.

::

    add(step)  ->  counted on the device; queued until the host knows whether it was skipped
    read()     ->  for each step known by now, in order: skips in a row, then every subscriber
                   (endless skips, on_nonfinite="raise", adapters, a page)

On the CPU a step is known at once. On a GPU the flag of a fused or one-pass step is on its way, and the step
is read when a later one is added, at update(), or when a caller waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.overflows import FirstModules, OverflowReport

RUN = 50
"""Skipped steps in a row that are worth a warning."""

_MOST_LATE = 256  # on devices that do not say when a flag has arrived

_NOTHING_TO_DO = "the optimizer's own step (nothing was to be unscaled, clipped or checked)"


class HostFlag:
    """A device flag (one element; above 0 means set) on its way to the host.

    On CUDA and XPU it is copied behind the work already queued; other devices read it when it is asked for.
    """

    def __init__(self, flag: Tensor, known: bool | None = None) -> None:
        self._flag, self._copy, self._known = flag, flag, known
        self._arrived: torch.Event | None = None
        # Else a CUDA graph writes it at each replay.
        self._is_lasting = known is not None or not capturing(flag.device)
        if known is None and flag.device.type in {"cuda", "xpu"} and self._is_lasting:
            self._copy = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(flag.reshape(()), non_blocking=True)
            self._arrived = torch.Event(flag.device)
            self._arrived.record(torch.accelerator.current_stream(flag.device))  # else of the current device

    @staticmethod
    def at_once(flag: Tensor) -> bool | None:
        """Return a flag that the host can read without waiting, on the CPU; None elsewhere."""
        on_host = flag.device.type == "cpu" and not capturing(flag.device)
        return bool(flag.item() > 0) if on_host else None

    def known(self) -> bool | None:
        """Return the flag if the host can know it without waiting, else None."""
        known = self._known
        if known is None and self._arrived is None:
            known = self.at_once(self._flag)
        elif known is None and self._arrived is not None and self._arrived.query():
            known = bool(self._copy.item() > 0)
        self._known = known if self._is_lasting else None
        return known

    def wait(self) -> bool:
        """Return the flag: a host sync if it is not known yet."""
        known = self.known()
        return bool(self._flag.item() > 0) if known is None else known


class StepResult:
    """The result of one ``scaler.step(optimizer)``.

    Owns its tensors: later steps do not change it. That of a step captured in a CUDA graph shows
    the last replay. Every property but :attr:`norm` and :attr:`found_inf` waits for the device when
    first read.

    Attributes:
        norm: Norm of the unscaled gradients before the first clip, float32, 0-dim; None if the optimizer
            had no gradients, or a disabled scaler has ``on_nonfinite="ignore"`` and measured nothing.
        found_inf: 1.0 if the step was skipped, else 0.0; float32, 0-dim.
        clipped_later: Computes :attr:`clipped_norm` without keeping the rest; None if that is ``norm``.
        how: How the step was taken, and why not in one pass; for people.
        one_pass: Whether it was taken in one pass.
        flag: ``found_inf`` on its way to the host.
    """

    def __init__(
        self,
        *,
        norm: Tensor | None,
        clipped: Callable[[], Tensor] | None = None,
        found_inf: Tensor,
        scale_before: Tensor | None,
        report: Callable[[], OverflowReport],
        scale_after: Sequence[Tensor] = (),
        known: bool | None = None,
        how: str = _NOTHING_TO_DO,
        one_pass: bool = False,
    ) -> None:
        self.norm = norm
        self.clipped_later = clipped
        self.how, self.one_pass = how, one_pass
        self.found_inf = found_inf
        self._scale_before = scale_before
        self._scale_after = scale_after  # filled by the update that follows
        self._report = report
        self._modules: FirstModules | None = None  # if hooks on modules were on
        self.flag = HostFlag(found_inf, known)

    @classmethod
    def unscaled(cls, norm: Tensor | None = None, how: str = _NOTHING_TO_DO) -> StepResult:
        """Return the result of a step without a loss scale: taken, with its norm if that was measured."""
        return cls(
            norm=norm,
            found_inf=torch.zeros((), device="cpu"),
            scale_before=None,
            report=OverflowReport,
            known=False,
            how=how,
        )

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        return self.flag.wait()

    def skipped_if_known(self) -> bool | None:
        """Return whether the step was skipped, or None if the host would have to wait to know."""
        return self.flag.known()

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients came with a loss scale."""
        return self._scale_before is not None

    @property
    def scale_before(self) -> float:
        """The loss scale the gradients came with."""
        return 1.0 if self._scale_before is None else float(self._scale_before.item())

    @property
    def scale_after(self) -> float:
        """The loss scale after the update that followed; ``scale_before`` until it is applied."""
        return float(self._scale_after[0].item()) if self._scale_after else self.scale_before

    @property
    def clipped_norm(self) -> Tensor | None:
        """As ``norm``, of the gradients that the step used: after clipping, whoever has clipped."""
        return self.norm if self.clipped_later is None else self.clipped_later()

    def add_modules(self, modules: FirstModules) -> None:
        """Take what hooks on modules have seen of the step."""
        self._modules = modules

    def overflow_report(self) -> OverflowReport:
        """Return the names of the parameters whose gradients were not finite, and what that means.

        If a page or AmpMonitor watches, and an earlier step was skipped, it also names the module at which
        the step went wrong.
        """
        report, modules = self._report(), self._modules
        if report:
            scaled = self.scale_before > 1.0 and not (modules and modules.forward)
            return replace(report, scaled=scaled, modules=modules)
        if self.skipped:
            return OverflowReport(elsewhere=True, modules=modules)
        not_finite = self.norm is not None and not bool(torch.isfinite(self.norm))
        return OverflowReport(unattributed=True) if not_finite else report

    def __repr__(self) -> str:
        """Show the numbers: a host sync."""
        norm = None if self.norm is None else self.norm.item()
        return (
            f"StepResult(skipped={self.skipped}, norm={norm}, scale_before={self.scale_before}, "
            f"scale_after={self.scale_after})"
        )


class LoggedStep(NamedTuple):
    """A step whose result the host knows."""

    optimizer: weakref.ref[Optimizer]
    kind: str  # the optimizer's type, for texts
    result: StepResult
    in_a_row: int  # skipped steps of the optimizer, one after the other, this one included
    number: int = 0  # of the steps that the host knows of this optimizer, from 1 on

    def first_skip(self) -> str:
        """Return that a step was skipped in a run without a loss scale, where none is to be expected.

        It never waits: on a GPU the names of the parameters are still there.
        """
        why = "last_step(optimizer).overflow_report() names the gradients that were not finite"
        if self.result.found_inf.is_cpu:
            why = self.result.overflow_report().summary()
        return (
            f"step {self.number} of {self.kind} was skipped, and nothing is scaled: {why}. Run "
            "`amp-plugin diagnose train.py`: it names the op and its line. Later skips are counted without a "
            "warning"
        )

    def run_of_skips(self) -> str:
        """Return how many steps were skipped in a row, by which gradients, and what that means."""
        result, report = self.result, self.result.overflow_report()
        report = replace(report, scaled=report.scaled and not report.nan)  # else the scale is not the cause
        why = "although nothing is scaled"
        if result.is_scaled:
            further = "" if report.scaled else ": lowering it further will not help"
            why = f"and the loss scale is {result.scale_after:g}{further}"
        where = f"{report.modules} " if report.modules else ""
        steps = f"{self.in_a_row} step{'s' * (self.in_a_row > 1)} of {self.kind}"
        return (
            f"{steps} in a row were skipped ({report.summary()}), {why}. {report.meaning()} "
            f"{where}Run `amp-plugin diagnose train.py`: it names the op and its line."
        )


Subscriber = Callable[[LoggedStep], None]


def _ignore(_: object) -> None:
    """Take no notice."""


def reference_to(optimizer: Optimizer, gone: Callable[[Any], object] | None = None) -> Any:
    """Return a weak reference to an optimizer; a strong one to an object that allows no weak ones."""
    try:
        return weakref.ref(optimizer, gone)
    except TypeError:
        return lambda: optimizer


class _Record:
    """What the log keeps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = reference_to(optimizer)
        self.kind = type(optimizer).__name__
        self.exact = False
        self.is_warned_of = False
        self.start_over()

    def start_over(self) -> None:
        """Forget all steps."""
        self.skipped: Tensor | None = None  # float32, 0-dim, on the device
        self.in_a_row = 0
        self.steps = 0  # that the host knows of
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


_followers: list[Callable[[StepLog], None]] = []


@contextmanager
def new_logs(follower: Callable[[StepLog], None]) -> Iterator[None]:
    """Call ``follower`` with each log that is made while the block is open: of programs nobody edits."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


class StepLog:
    """The steps of a scaler's optimizers, taken or skipped.

    It counts steps, keeps what the device has not told yet, and calls its subscribers.
    """

    def __init__(self, skipped_before: int = 0) -> None:
        self.skipped_before = skipped_before  # what a loaded state or a copied scaler brings along
        self.has_steps = False
        self.has_captured = False  # a step in a CUDA graph: nobody is called at its replays
        self._records: dict[int, _Record] = {}
        self._late: deque[tuple[HostFlag, Callable[[bool], None]]] = deque()  # what the host learns later
        self._waits = False  # after each step for the device, so that a skip is known at once
        self._subscribers: list[Subscriber] = []
        self._watchers = 0  # for whom each step is read before the next one
        self._hearers: list[Callable[[Any], None]] = []  # of losses
        self._has_taken = False  # a step since the last run
        self._has_warned = False  # of a skip without a loss scale
        self._last_skip: LoggedStep | None = None  # of a run that has taken none
        for follower in _followers:
            follower(self)

    def add(self, optimizer: Optimizer, result: StepResult) -> None:
        """Count a step, skipped where ``result.found_inf`` is 1, and read what is known by now."""
        record = self._record_of(optimizer)
        found = result.found_inf
        record.count(found, skipped=result.skipped_if_known())
        self.has_steps = True
        if capturing(found.device):
            self.has_captured = True
        else:
            self._late.append((result.flag, partial(self._learn, record, result)))
        try:
            self.read(wait=self._waits or record.exact or len(self._late) > _MOST_LATE)
        finally:
            record.is_held = record.owed > 0
            record.owed -= record.is_held
        if self._watchers:  # after the schedulers: who watches does not change when they are held
            self.read(wait=True)

    def when_known(self, flag: Tensor, then: Callable[[bool], None]) -> None:
        """Call ``then`` with a flag on the device (one element) in its turn, once the host knows it."""
        if not capturing(flag.device):
            self._late.append((HostFlag(flag), then))

    def note_loss(self, loss: Any) -> None:
        """Pass a loss that a backward pass begins from, before it is scaled, to those who hear losses."""
        for hear in list(self._hearers):
            hear(loss)

    def start_over(self, skipped_before: int) -> None:
        """Go on from a count: forget all steps, and what is not known yet; ``wait_for`` holds on."""
        self.skipped_before = skipped_before
        self._late.clear()
        for record in self._records.values():
            record.start_over()

    def read(self, *, wait: bool = False) -> None:
        """Learn, in order, what the host knows by now; with ``wait`` everything, a host sync."""
        while self._late and (wait or self._late[0][0].known() is not None):
            flag, then = self._late.popleft()
            then(flag.wait())

    def unread(self) -> int:
        """Return how many results the host does not know yet."""
        return len(self._late)

    def end_run(self, warn: Callable[[str], Any] | None = warn_user) -> None:
        """End a run: warn if it has skipped every step, a host sync; None only forgets, as after an error."""
        self.read(wait=warn is not None)
        last, self._last_skip, self._has_taken = self._last_skip, None, False
        if last is not None and warn is not None:
            warn(f"the run has ended and no optimizer step was taken: {last.run_of_skips()}")

    def subscribe(self, subscriber: Subscriber, *, first: bool = False) -> None:
        """Call ``subscriber`` with each step in order once the host knows it, ``first`` before others."""
        self._subscribers.insert(0 if first else len(self._subscribers), subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` no more."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    @contextmanager
    def watched(self, watcher: Subscriber = _ignore, hear: Callable[[Any], None] = _ignore) -> Iterator[None]:
        """While the block is open, call ``watcher`` right after each step and ``hear`` with each loss.

        The host waits for the device after each step. Schedulers sit out the same steps as without it.
        """
        self.subscribe(watcher, first=True)
        self._watchers += 1
        self._hearers.append(hear)
        try:
            yield
        finally:
            self._hearers.remove(hear)
            self._watchers -= 1
            self.unsubscribe(watcher)

    def _learn(self, record: _Record, result: StepResult, skipped: bool) -> None:
        record.in_a_row = record.in_a_row + 1 if skipped else 0
        record.steps += 1
        record.owed += skipped
        step = LoggedStep(record.optimizer, record.kind, result, record.in_a_row, record.steps)
        self._has_taken |= not skipped
        self._last_skip = None if self._has_taken else step
        if skipped and not result.is_scaled and not self._has_warned:
            self._has_warned = True
            warn_user(step.first_skip())
        if step.in_a_row == RUN and not record.is_warned_of:
            record.is_warned_of = True
            warn_user(step.run_of_skips())
        for subscriber in list(self._subscribers):
            subscriber(step)

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of one optimizer or (None) of all: a host sync."""
        if optimizer is not None:
            record = self._records.get(id(optimizer))
            return 0 if record is None else record.total()
        return self.skipped_before + sum(record.total() for record in self._records.values())

    def holds_schedulers(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's schedulers sit out its last step: once for each skip that became known."""
        record = self._records.get(id(optimizer))
        return record is not None and record.is_held

    def wait_for(self, optimizer: Optimizer | None = None) -> None:
        """Wait for the device after each later step of an optimizer, or (None) of all."""
        if optimizer is None:
            self._waits = True
        else:
            self._record_of(optimizer).exact = True

    def _record_of(self, optimizer: Optimizer) -> _Record:
        record = self._records.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            self.skipped_before += 0 if record is None else record.total()  # of an optimizer that is gone
            record = self._records[id(optimizer)] = _Record(optimizer)
        return record


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
            f"the weights are those of before. {report.meaning()} {report.modules or ''} "
            "on_nonfinite='skip' goes on without such steps."
        )
        raise FloatingPointError(msg)

    return look
