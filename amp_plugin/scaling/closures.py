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

from amp_plugin.scaling.clipping import NormClip, wants_torchs_bits
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_state import OptimizerState, uses_gradients_before_closure
from amp_plugin.scaling.spikes import Verdict
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.scaling.updates import is_watched
from amp_plugin.weights.weight import fp32_shown

Closure = Callable[[], Any]

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
    if state.shared.enabled:
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
    """Step an optimizer by ``call`` of a checked closure; waits for the device in each call.

    ::

        gradients that the optimizer may use before its first call are not finite   ->  no step
        each call:  closure, unscale, measure;  not finite  ->  leave the step, put back what it has changed
                    else clip, and let the optimizer go on
    """
    is_scaled = state.shared.enabled
    verdicts: list[Verdict] = []  # on each call
    loss = value = None

    def check() -> Any:
        nonlocal loss
        loss = run(state, closure)
        with torch.no_grad():
            verdicts.append(_unscaled(state, clip, is_first=not verdicts))
            norm, found, *_ = verdicts[-1]
            if not capturing(found.device) and found.item() > 0:
                raise _NonfiniteError
            if clip is not None and wants_torchs_bits(state.shared):
                clip.by_torch(state.params)
            elif clip is not None:
                state.clip_(norm, clip.max_norm, found)
        match_memory_order(optimizer)
        return loss

    skipped = is_scaled and state.overflowed_before_closure(optimizer)
    if not skipped:
        put_back = _snapshot(optimizer) if _may_change_early(optimizer) else None
        try:
            value = call(check)
        except _NonfiniteError:
            skipped, value = True, None if is_scaled else loss
            if put_back is not None:
                put_back()
    last = verdicts[-1] if verdicts else Verdict(*state.measure(unscale=False))
    if clip is not None and skipped:
        clip.refuse_nonfinite(last.norm)
    last = last._replace(judged=verdicts[0].judged if verdicts else None)
    return value, state.close(
        last,
        known=skipped,
        how=how,
        max_norm=None if clip is None else clip.max_norm,
    )


def _unscaled(state: OptimizerState, clip: NormClip | None, *, is_first: bool) -> Verdict:
    """Unscale and measure the gradients of a call; judge those of the first, which come before any change."""
    norm, found = state.unscale_(2.0 if clip is None else clip.norm_type)
    if not is_first:
        return Verdict(norm, found)
    verdict = state.judge(norm, found)
    if verdict.factor is not None:
        state.multiply_(verdict.factor)
    return verdict


def _may_change_early(optimizer: Optimizer) -> bool:
    """Whether anything may change before the last call: of torch's own optimizers only LBFGS does that."""
    return isinstance(optimizer, LBFGS) or uses_gradients_before_closure(optimizer)


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
