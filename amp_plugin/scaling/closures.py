"""Closures: LBFGS, SAM, and any optimizer that calls its closure itself.

The closure runs backward on ``scaler.scale(loss)`` and returns the loss itself; its gradients are unscaled
and checked before the optimizer goes on. If those of a call are not finite, the step is given up and what it
has already changed is put back. Gradients that the optimizer may use before its first call are checked too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from amp_plugin.scaling.clipping import NormClip, wants_torchs_bits
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_state import OptimizerState, uses_gradients_before_closure
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.scaling.updates import is_watched
from amp_plugin.weights.weight import fp32_shown

Closure = Callable[[], Any]

_NOT_PUT_BACK = (
    "{0}: a closure's gradients are not finite after the step has changed weights. Earlier steps did "
    "not do that before their last call of the closure, so no copy was kept to put them back. Load the "
    "last checkpoint; a new {0} keeps copies if its first step changes weights early."
)

_UNSCALED_BACKWARD = (
    "the closure ran backward() on a loss that was not scaled: call "
    "{backward} in it, and return the unscaled loss"
)

_SCALED_LOSS = (
    "the closure returned the scaled loss: scale it for backward() only, and return the loss itself"
)


class _NonfiniteError(Exception):
    """Leaves ``optimizer.step`` from inside its closure."""


def run(state: OptimizerState, closure: Closure) -> Any:
    """Run a closure and return its loss."""
    state.replace_norm(None)
    before = state.backwards
    with torch.enable_grad():
        loss = closure()
    if state.shared.scales.enabled:
        if state.backwards == before:
            _refuse_unscaled_backward(state)
        if is_watched(loss):  # a line search would compare it along unscaled gradients
            raise RuntimeError(_SCALED_LOSS)
    return loss


def _refuse_unscaled_backward(state: OptimizerState) -> None:
    """Raise if a closure, in which no scaled backward pass has begun, has changed unscaled gradients."""
    unscaled = None in state.scales_carried()
    if unscaled and state.ledger.has_gradients() and state.ledger.is_changed():
        raise RuntimeError(_UNSCALED_BACKWARD.format(backward=state.shared.words.backward))


def step(
    state: OptimizerState,
    optimizer: Optimizer,
    closure: Closure,
    call: Callable[[Closure], Any],
    how: str,
    clip: NormClip | None = None,
) -> tuple[Any, StepResult]:
    """Step an optimizer by ``call`` of a checked closure; waits for the device in each call."""
    calls = _CheckedCalls(state, optimizer, closure, clip)
    is_scaled = state.shared.scales.enabled
    restore = value = None
    skipped = is_scaled and state.overflowed_before_closure(optimizer)
    if not skipped:
        restore = _snapshot(optimizer) if calls.may_change_early() else None
        try:
            value = call(calls.run)
        except _NonfiniteError:
            skipped, value = True, None if is_scaled else calls.loss
            if restore is not None:
                restore()
            elif calls.changed_early:
                raise RuntimeError(_NOT_PUT_BACK.format(type(optimizer).__name__)) from None
        finally:
            if calls.called:  # for the next step
                state.note_early_change(calls.changed_early)
    norm, found = calls.found or state.measure(unscale=False)
    if clip is not None and skipped:
        clip.refuse_nonfinite(norm)
    clipped = None if clip is None else partial(clip.clipped, norm, found)
    return value, state.close(norm, found, known=skipped, how=how, clipped=clipped)


class _CheckedCalls:
    """The calls of one step's closure, and what was found in their gradients."""

    def __init__(
        self, state: OptimizerState, optimizer: Optimizer, closure: Closure, clip: NormClip | None
    ) -> None:
        self._state, self._optimizer, self._closure, self._clip = state, optimizer, closure, clip
        self._foreign = uses_gradients_before_closure(optimizer)
        self._versions = self._versions_now()
        self.called = False
        self.found: tuple[Tensor, Tensor] | None = None
        self.changed_early = False  # the optimizer has changed a weight before a call
        self.loss: Any = None  # what the last call returned

    def may_change_early(self) -> bool:
        """Whether anything may change before the last call: of torch's optimizers, only LBFGS does that."""
        known = None if self._state.shared.scales.enabled else self._state.changes_early
        return isinstance(self._optimizer, LBFGS) or (self._foreign and known is not False)

    def run(self) -> Any:
        """Run the closure, unscale its gradients, and leave the step if they are not finite."""
        self.changed_early |= self.called or self._versions != self._versions_now()
        self.called = True
        self.loss = run(self._state, self._closure)
        with torch.no_grad():
            self.found = self._state.unscale_(2.0 if self._clip is None else self._clip.norm_type)
            norm, found = self.found
            if not capturing(found.device) and found.item() > 0:
                raise _NonfiniteError
            if self._clip is not None and wants_torchs_bits(self._state.shared):
                self._clip.by_torch(self._state.params)
            elif self._clip is not None:
                self._state.multiply_(self._clip.factor(norm, found))
        match_memory_order(self._optimizer)
        return self.loss

    def _versions_now(self) -> list[int]:
        return [param._version for param in self._state.params] if self._foreign else []


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Copy an optimizer's parameters, exact where they are stored in 16 bits, and its state.

    Returns:
        What puts everything back.
    """
    params = params_of(optimizer)
    with fp32_shown(params):
        values = [(param, param.detach().clone()) for param in params]
    state = tree_map(_copied, dict(optimizer.state))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore() -> None:
        with fp32_shown(param for param, _ in values):
            for param, value in values:
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)

    return restore


def _copied(value: Any) -> Any:
    """A copy of what optimizer state holds, parameters kept as they are."""
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    return copy.copy(value)
