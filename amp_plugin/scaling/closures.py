"""Steps with a closure, for LBFGS, SAM and any other optimizer that calls its closure itself.

The closure runs backward on ``scaler.scale(loss)`` and returns the unscaled loss. After each call the
gradients are unscaled and checked. If a gradient is inf or nan, the step ends, and its changes so far are
undone. An optimizer may use existing gradients before it calls the closure, so they are checked too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from amp_plugin.scaling.clipping import NormClip, clip_measured
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_state import OptimizerState, uses_gradients_before_closure
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
    """Raised inside a closure to abort the optimizer's step, because a gradient is inf or nan."""


def run(state: OptimizerState, closure: Closure) -> Any:
    """Run a closure and return its loss."""
    before = state.backwards
    with torch.enable_grad():
        loss = closure()
    # Without loss scaling, discard the stored norm if the closure has changed a gradient.
    state.forget_stale_norm()
    if state.shared.enabled:
        unscaled = state.backwards == before and None in state.scales_carried()
        if unscaled and state.ledger.has_gradients() and state.ledger.is_changed():
            raise RuntimeError(_UNSCALED_BACKWARD.format(backward=state.shared.words.backward))
        if is_watched(loss):  # a line search needs unscaled losses
            raise RuntimeError(_SCALED_LOSS)
    return loss


def step(
    state: OptimizerState,
    optimizer: Optimizer,
    closure: Closure,
    call: Callable[[Closure], Any],
    how: str,
    clip: NormClip | None = None,
) -> tuple[Any, StepResult]:
    """Step an optimizer with a closure, and check the gradients after each call. The host waits each time.

    ::

        If the optimizer may use gradients before it calls the closure, and one of them is inf or nan, skip
        the step.
        In each call to the closure:
            Run the closure, unscale the gradients, and compute their norm.
            If a gradient is inf or nan, abort the step and undo its changes.
            Otherwise clip the gradients, and let the optimizer continue.

    Args:
        state: The state of the optimizer.
        optimizer: The optimizer, or an optimizer that wraps it.
        closure: The user's closure.
        call: A function that takes a closure and calls the optimizer's step with it.
        how: The string for ``StepResult.how``.
        clip: How to clip the gradients after each call to the closure, or None.

    Returns:
        The return value of the optimizer's step, and the StepResult.
    """
    is_scaled = state.shared.enabled
    norm_type = 2.0 if clip is None else clip.norm_type
    last: tuple[Tensor, Tensor] | None = None  # norm and found_inf in the last call
    loss = value = judged = None

    def check() -> Any:
        nonlocal loss, last, judged
        loss = run(state, closure)
        with torch.no_grad():
            norm, found = state.unscale_(norm_type)
            # Only the first call is checked for a spike, because the weights change before later calls.
            if last is None:
                norm, found, _, judged = state.judge(norm, found)
            last = norm, found
            if not capturing(found.device) and found.item() > 0:
                raise _NonfiniteError
            if clip is not None:
                clip_measured(state, clip, norm, found)
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
    norm, found = last or state.measure(unscale=False)
    if clip is not None and skipped:
        clip.refuse_nonfinite(norm)
    return value, state.close(norm, found, judged, known=skipped, how=how, max_norm=clip and clip.max_norm)


def _may_change_early(optimizer: Optimizer) -> bool:
    """Return whether a step may change weights before its last call to the closure, as LBFGS does."""
    return isinstance(optimizer, LBFGS) or uses_gradients_before_closure(optimizer)


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """Copy an optimizer's parameters and state, including weights stored in 16 bits, without rounding.

    Returns:
        A function that restores the parameters and the state.
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
    """Copy a value of an optimizer's state. Parameters are not copied."""
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    return copy.copy(value)
