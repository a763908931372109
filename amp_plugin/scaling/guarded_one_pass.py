"""Steps in one pass where nothing is scaled: what the guard or a clip reads, and then one read by the step.

::

    clip_grad_norm_(fold=True):  norm and flag of the gradients; the factor is left to the step
    step:                        found_inf, read by the guard or known from the clip
                                 parameters, state = rule(parameters, gradients * factor, state)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling import one_pass
from amp_plugin.scaling.clipping import NormClip
from amp_plugin.scaling.guard import Check, Guard
from amp_plugin.scaling.one_pass import NotInOnePassError, OnePassStep
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.unscaled_gradients import Found


def obstacle(guard: Guard, window: OptimizerWindow) -> str:
    """Say why an optimizer's steps cannot be taken in one pass, whatever the tensors; empty if they can."""
    if not guard.one_pass:
        return "one_pass=False"
    if not guard.checks:
        return "on_nonfinite='ignore' takes torch's own step"
    if any(not param.is_cpu for param in window.params[:1]):
        return "its parameters are on a GPU, where a fused step reads and writes as little"
    return one_pass.obstacle(window.optimizer)


def fold_clip(guard: Guard, window: OptimizerWindow, clip: NormClip) -> Tensor | None:
    """Leave a clip by norm to the step, if it can be.

    Returns:
        The norm before clipping, float32, 0-dim; None if gradients have to be written, or if there are none.

    Raises:
        RuntimeError: Gradients have changed since an earlier clip was left to the step.
    """
    gradients = window.unscaled
    gradients.forget_dropped_clip(window.params)
    if window.spans_ranks or torch.compiler.is_compiling() or obstacle(guard, window):
        return None
    _refuse_changed(window)
    found = gradients.measure(window.params, window.layouts, guard.ranks, clip.norm_type)
    if found is None or _norm_is_too_large(found):
        return None
    return gradients.fold_clip(found, clip.max_norm, clip.norm_type, window.params)


def check(guard: Guard, window: OptimizerWindow) -> Check:
    """Look whether gradients with a folded clip are finite; the clip is then of what they are at the step.

    Raises:
        RuntimeError: They were seen to change since they were clipped.
    """
    gradients = window.unscaled
    _refuse_changed(window)
    found = gradients.take_found()
    if found is None:
        found = gradients.measure(window.params, window.layouts, guard.ranks)
        gradients.clip_again(lambda order: _norm_of(guard, window, order))
    return Check() if found is None else Check(gradients.norm, found[2], found[0])


def collect(
    guard: Guard, window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> OnePassStep | None:
    """Return a step in one pass, ready to be taken; None if the optimizer's own is to run.

    Notes why in ``window.obstacle``.
    """
    window.obstacle = "step() was given arguments" if args or kwargs else obstacle(guard, window)
    if window.obstacle:
        return None
    try:
        return one_pass.collect(optimizer)
    except NotInOnePassError as error:
        window.obstacle = str(error)
        return None


def step(window: OptimizerWindow, one_pass_step: OnePassStep, *, skipped: bool) -> None:
    """Step, or do nothing if the step is skipped; gradients are as they were in either case."""
    clip = window.unscaled.clip
    if not skipped:
        one_pass_step.take(None if clip is None else clip.divisor(torch.ones(())), None)
    window.unscaled.leave_unwritten(window.params, skipped=skipped)


def _norm_is_too_large(found: Found) -> bool:
    """Whether a norm is beyond float32's range though no gradient is: torch makes zeros of them."""
    _, norm, flag = found
    return not (bool(norm.isfinite()) or bool(flag > 0))


def _norm_of(guard: Guard, window: OptimizerWindow, order: float) -> Tensor:
    found = window.unscaled.measure(window.params, window.layouts, guard.ranks, order)
    return torch.zeros(()) if found is None else found[1]


def _refuse_changed(window: OptimizerWindow) -> None:
    if window.unscaled.clip is not None and window.unscaled.changed_since_clip(window.params):
        msg = (
            "gradients were changed between clip_grad_norm_(..., fold=True) and step(): they were not "
            "clipped yet then. Call it with fold=False, or change them before."
        )
        raise RuntimeError(msg)
