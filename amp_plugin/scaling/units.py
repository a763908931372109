"""When the unit of gradients changes: when a backward from a scaled loss begins, and when the scale changes.

Only such a backward makes scaled gradients. Versions of tensors cannot tell a user's clipping from a backward
that adds to a gradient; a hook on the scaled output can, which runs before any gradient of that backward
exists. ``update()`` is a request until no gradient depends on the old scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_plugin.messages import warn_user
from amp_plugin.options import between
from amp_plugin.scaling.loss_scale import LossScale, PendingScale
from amp_plugin.scaling.per_optimizer import PerOptimizerState
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.step_log import StepLog

_NO_STEP = (
    "update(): no gradient was checked: a scaled loss ran backward(), but this scaler knows no optimizer. "
    "Call scaler.step(optimizer) instead of optimizer.step(), which takes the scaled gradients as they are; "
    "if the first step is still to come, call scaler.register(optimizer) before."
)

_AT_FLOOR = (
    "gradients overflowed although the loss scale is at min_scale: lowering it further does not help. Look "
    "at last_step(optimizer).overflow_report(), lower min_scale, or use bfloat16."
)


class Units:
    """The backward passes from scaled losses, and the requested update of the loss scales."""

    def __init__(self, registry: Registry, log: StepLog) -> None:
        self._scales, self._registry, self._log = registry.shared.scales, registry, log
        self._task = -1  # of the last backward
        self.requested = False  # an update waits for gradients that depend on the old scale
        self._told_of_floor = False

    def watch(self, output: Tensor, reading: PendingScale) -> None:
        """Learn when a backward from a scaled ``output`` begins; not under functorch."""
        if not output.requires_grad or torch._C._functorch.maybe_current_level() is not None:
            return
        output.register_hook(partial(_begin, weakref.ref(self), reading))  # type: ignore[no-untyped-call]

    def begin(self, reading: PendingScale) -> None:
        """Get all gradients ready for a backward from an output scaled by a loss scale."""
        loss_scale = reading.loss_scale
        task = torch._C._current_graph_task_id()
        last = self._registry.last_backward
        if last is not None and task == self._task:
            if last.loss_scale is not loss_scale:
                msg = (
                    "one backward() brings gradients of two losses with scales of their own, which cannot be "
                    "told apart: call backward() on each scaled loss, one after the other."
                )
                raise RuntimeError(msg)
            return
        self._task = task
        self._registry.refresh_joined()
        self._registry.note_backward(reading if reading.change() is None else loss_scale.read())
        # In this order: which states unscale again is known only before units change; clips are written
        # before gradients are added to; marks are set after converting.
        states = list(self._registry)
        unscaled = [state for state in states if any(g.unit is None for g in state.groups)]
        again = [state for state in unscaled if state.stage is OptState.UNSCALED]
        for state in states:
            state.write_clip()
        several_ranks = any(state.spans_ranks for state in states)
        for gradients in self._registry.groups():
            gradients.convert_for_backward_(loss_scale, several_ranks=several_ranks)
        for state in states:
            state.note_backward()
        if again:  # after the callbacks that DDP and FSDP queue in the backward, hence queued twice
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(partial(_unscale_again, again)))

    def request(self) -> None:
        """Ask for an update; applied at once if no gradient waits."""
        if not self._log.has_steps and self._registry.last_backward is not None and not self._registry:
            raise RuntimeError(_NO_STEP)
        self._scales.updates_requested += 1
        self.requested = True
        self.settle(force=False)

    def set_scale(self, new_scale: float | Tensor) -> None:
        """Set all loss scales at once; pending gradients are converted."""
        value = _checked(new_scale)
        with self.set_by_hand(f"update({new_scale!r})"):
            self._scales.updates_requested += 1
            for loss_scale in self._scales.materialized():
                loss_scale.found_inf = None
                loss_scale.fill_(value)

    @contextmanager
    def set_by_hand(self, call: str) -> Iterator[None]:
        """Go on from loss scales that a block sets: no update is requested, pending gradients are converted.

        Raises if float16 gradients wait that a new scale would have to be written into.
        """
        for name in self._halves():
            msg = (
                f"{call} would convert the float16 gradient of parameter {name!r} to another scale, which "
                "loses small ones: call it after step(), or clear the gradients with zero_grad()."
            )
            raise RuntimeError(msg)
        before = [(loss_scale, loss_scale.snapshot()) for loss_scale in self._scales.materialized()]
        yield
        self.requested = False
        for loss_scale, old in before:
            self._convert(loss_scale, old)
            loss_scale.publish()

    def settle(self, *, force: bool) -> None:
        """Apply a requested update, unless gradients wait that depend on the scale."""
        if not self.requested or (not force and self._registry.delays_update()):
            return
        joined = self._registry.refresh_joined()
        if any(self._halves(pending=True)) if force else joined and self._registry.delays_update():
            return
        self.requested = False
        for loss_scale in self._scales.materialized():
            if loss_scale.found_inf is not None:
                old = loss_scale.snapshot()
                at_floor = loss_scale.update_()
                if at_floor is not None:
                    self._log.when_known(at_floor, self._tell_of_floor)
                self._convert(loss_scale, old)
            loss_scale.publish()
        self._log.read()

    def _halves(self, *, pending: bool = False) -> Iterator[str]:
        """Yield the names of scaled float16 gradients; with ``pending`` of those that wait for a step."""
        for state in self._registry:
            for gradients in state.groups:
                waits = gradients.is_pending(state.number) if pending else gradients.scaled_by is not None
                param = gradients.first_float16() if waits else None
                if param is not None:
                    yield state.name_of(param)

    def _convert(self, loss_scale: LossScale, old: Tensor) -> None:
        """Multiply the gradients that carry the old scale by new/old."""
        carriers = [
            gradients
            for gradients in self._registry.groups()
            if gradients.scaled_by is loss_scale and gradients.has_gradients()
        ]
        if carriers:
            factor = loss_scale.require() / old
            for gradients in carriers:
                gradients.multiply_(factor)

    def _tell_of_floor(self, overflowed: bool) -> None:
        """Raise, or warn once, of an overflow at the floor."""
        if overflowed and self._scales.default.options.on_min_scale == "raise":
            raise FloatingPointError(_AT_FLOOR)
        if overflowed and not self._told_of_floor:
            self._told_of_floor = True
            warn_user(f"{_AT_FLOOR} Such steps are skipped, and on_min_scale='raise' ends the run.")


def is_watched(output: object) -> bool:
    """Return whether something is a loss that was scaled."""
    hooks = getattr(output, "_backward_hooks", None) or {}
    return any(isinstance(hook, partial) and hook.func is _begin for hook in hooks.values())


def _begin(units: weakref.ref[Units], reading: PendingScale, grad: Tensor) -> Tensor | None:
    """Begin the backward; if the scale has changed since ``scale()``, correct what comes in."""
    owner = units()
    if owner is not None:
        owner.begin(reading)
    change = reading.change()
    return None if change is None else grad * change.to(device=grad.device, dtype=grad.dtype)


def _unscale_again(states: list[PerOptimizerState]) -> None:
    """After a backward in mid-window: what was unscaled before it is unscaled again."""
    for state in states:
        if state.stage is OptState.UNSCALED:
            state.measure(unscale=True)


def _checked(new_scale: float | Tensor) -> float | Tensor:
    if not isinstance(new_scale, Tensor):
        return between("new_scale", new_scale, 0)
    if new_scale.numel() != 1 or not new_scale.is_floating_point():
        msg = (
            f"new_scale must be a number or a floating tensor of one element, got "
            f"{tuple(new_scale.shape)} of {new_scale.dtype}"
        )
        raise ValueError(msg)
    return new_scale
