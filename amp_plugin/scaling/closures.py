"""Closures: LBFGS, SAM, and any optimizer that calls its closure itself.

The closure runs backward on ``scaler.scale(loss)`` and returns the loss itself; its gradients are unscaled
and checked before the optimizer goes on. If those of a call are not finite, the step is given up and what it
has already changed is put back. Gradients that the optimizer may use before its first call are checked too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.per_optimizer import PerOptimizerState
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.scaling.units import is_watched
from amp_plugin.weights.weight import fp32_shown

Closure = Callable[[], Any]

_NOT_PUT_BACK = (
    "{0}: a closure's gradients are not finite after the step has changed weights. Earlier steps did "
    "not do that before their last call of the closure, so no copy was kept to put them back. Load the "
    "last checkpoint; a new {0} keeps copies if its first step changes weights early."
)


class _NonfiniteError(Exception):
    """Leaves ``optimizer.step`` from inside its closure."""


def run(state: PerOptimizerState, closure: Closure) -> Any:
    """Run a closure and return its loss."""
    before = state.backwards
    state.norm = None  # of an earlier call
    with torch.enable_grad():
        loss = closure()
    unseen = [gradients for gradients in state.groups if state.is_scaled and state.backwards == before]
    if any(gr.scaled_by is None and gr.has_gradients() and gr.is_changed() for gr in unseen):
        msg = (
            "the closure ran backward() on a loss that was not scaled: call "
            "scaler.scale(loss).backward() in it, and return the unscaled loss"
        )
        raise RuntimeError(msg)
    if state.is_scaled and is_watched(loss):  # a line search would compare it along unscaled gradients
        msg = "the closure returned the scaled loss: scale it for backward() only, and return the loss itself"
        raise RuntimeError(msg)
    return loss


def step(
    state: PerOptimizerState, optimizer: Optimizer, closure: Closure, call: Callable[[Closure], Any]
) -> tuple[Any, StepResult]:
    """Step an optimizer by ``call`` of a checked closure; waits for the device in each call."""
    calls = _CheckedCalls(state, optimizer, closure)
    saved = value = None
    skipped = state.is_scaled and overflowed_before(state, optimizer)
    if not skipped:
        saved = Snapshot(optimizer) if calls.may_change_early() else None
        try:
            value = call(calls.run)
        except _NonfiniteError:
            skipped, value = True, None if state.is_scaled else calls.loss
            if saved is not None:
                saved.restore()
            elif calls.changed_early:
                msg = _NOT_PUT_BACK.format(type(optimizer).__name__)
                raise RuntimeError(msg) from None
        finally:
            if calls.called:  # for the next step
                state.changes_early = bool(state.changes_early or calls.changed_early)
    norm, found = calls.found or state.measure(unscale=False)
    return value, state.close(state.result_of_step(norm, found, known=skipped))


class _CheckedCalls:
    """The calls of one step's closure, and what was found in their gradients."""

    def __init__(self, state: PerOptimizerState, optimizer: Optimizer, closure: Closure) -> None:
        self._state, self._optimizer, self._closure = state, optimizer, closure
        self._foreign = uses_gradients_before_closure(optimizer)
        self._versions = self._versions_now()
        self.called = False
        self.found: tuple[Tensor, Tensor] | None = None
        self.changed_early = False  # the optimizer has changed a weight before a call
        self.loss: Any = None  # what the last call returned

    def may_change_early(self) -> bool:
        """Whether anything may change before the last call: of torch's optimizers, only LBFGS does that."""
        known = None if self._state.is_scaled else self._state.changes_early
        return isinstance(self._optimizer, LBFGS) or (self._foreign and known is not False)

    def run(self) -> Any:
        """Run the closure, unscale its gradients, and leave the step if they are not finite."""
        self.changed_early |= self.called or self._versions != self._versions_now()
        self.called = True
        self.loss = run(self._state, self._closure)
        with torch.no_grad():
            self.found = self._state.unscale_(on_request=True)
            found = self.found[1]
            if not capturing(found.device) and found.item() > 0:
                raise _NonfiniteError
        match_memory_order(self._optimizer)
        return self.loss

    def _versions_now(self) -> list[int]:
        return [param._version for param in self._state.params] if self._foreign else []


def overflowed_before(state: PerOptimizerState, optimizer: Optimizer) -> bool:
    """Unscale what backward passes have left that the optimizer may use before it calls its closure."""
    left = uses_gradients_before_closure(optimizer) and state.is_awaited() and state.has_gradients()
    return left and bool(state.unscale_(on_request=True)[1].item() > 0)


def uses_gradients_before_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may use gradients that were made before it calls its closure, as SAM does."""
    return not type(optimizer).__module__.startswith("torch.optim")


class Snapshot:
    """Copies of an optimizer's parameters, exact where they are stored in 16 bits, and of its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = params_of(optimizer)
        with fp32_shown(params):
            self._params = [(param, param.detach().clone()) for param in params]
        self._state = tree_map(_copied, dict(optimizer.state))
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        with fp32_shown(param for param, _ in self._params):
            for param, value in self._params:
                param.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)


def _copied(value: Any) -> Any:
    """A copy of what optimizer state holds, parameters kept as they are."""
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    return copy.copy(value)
