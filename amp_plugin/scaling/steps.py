"""The optimizer step, with or without a loss scale. Without one, gradients are not divided.

::

    choose       Choose among a one-pass step, a fused step and a plain step.
    measure      Read the gradients once, and compute their norm and found_inf.
    combine      Combine the norm and found_inf over all ranks.
    judge        With on_spike=, decide whether the step is a spike.
    clip factor  Compute the factor, if the step also clips.
    take         Step unless found_inf is 1. The host waits for found_inf only in a plain step.
    close        Record that the gradients are unscaled, and add the StepResult to the log.

A one-pass step unscales and clips the gradients while it reads them, and writes them back to ``.grad``.
Before a fused or plain step, gradients are unscaled and clipped in place. After every step ``.grad`` is
unscaled and clipped, even if the step was skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.mistakes import MISTAKES
from amp_plugin.scaling import closures
from amp_plugin.scaling.clipping import NormClip, clip_measured
from amp_plugin.scaling.core import ScalerCore
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import divisor_of
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.plans import OnePass, choose, why_not_one_pass
from amp_plugin.scaling.step_log import StepResult

_NO_UPDATE = (
    f"step() has already been called since the last update(): {MISTAKES['AMP004'].instead}. "
    "Or make the scaler with dynamic=False; if another optimizer has yet to step in this "
    "iteration, register() both before the first."
)

_NOTHING_CHECKED = (
    "No inf checks were recorded for this optimizer: {kind} has no gradient. Perhaps no loss has run "
    "backward(), or the loss does not depend on its parameters; perhaps zero_grad() ran before the step; "
    "perhaps the optimizer steps within backward() or moves its gradients to the CPU there. Such an "
    "optimizer needs a run without a loss scale: bfloat16, or GradScaler(enabled=False)."
)


def take_step(
    core: ScalerCore, optimizer: Optimizer, args: Any, kwargs: dict[str, Any], clip: NormClip | None = None
) -> tuple[Any, StepResult]:
    """Step an optimizer on behalf of :meth:`amp_plugin.GradScaler.step` and ``clip_and_step``."""
    shared = core.shared
    if not (shared.enabled or shared.checks):
        return _take_unchecked(core, optimizer, args, kwargs, clip)
    closure, args, kwargs = _take_closure(args, kwargs)
    if closure is None and shared.enabled:
        shared.require_scale("step", optimizer)
    state = core.state(optimizer)
    why_not = why_not_one_pass(state, optimizer, has_arguments=bool(args or kwargs))
    if shared.enabled and core.is_step_refused(state, repeats=closure is not None):
        raise RuntimeError(_NO_UPDATE)
    call = partial(state.run_step, optimizer.step, *args, **kwargs)
    if closure is None:
        refuse_nothing_checked(core, state)
        value, result = _take(state, optimizer, call, why_not, clip)
    elif why_not:
        how = f"the optimizer's own step, with a closure ({why_not})"
        step = partial(optimizer.step, **kwargs)
        call_with = partial(state.run_step, lambda run: step(run, *args))
        value, result = closures.step(state, optimizer, closure, call_with, how, clip)
    else:
        value, result = _take_after_closure(state, closure, call, clip)
    core.log.add(state.optimizer, result)
    return value, result


def _take_after_closure(
    state: OptimizerState, closure: Callable[[], Any], call: Callable[[], Any], clip: NormClip | None
) -> tuple[Any, StepResult]:
    """Run the closure first, as torch's own optimizers do, and then step in one pass."""
    value, is_scaled = closures.run(state, closure), state.shared.enabled
    if is_scaled:
        state.shared.require_scale("step", state.params)
    _, result = _take(state, state.optimizer, call, "", clip)
    return None if is_scaled and result.skipped_if_known() else value, result


def _take(
    state: OptimizerState, optimizer: Optimizer, call: Callable[[], Any], why_not: str, clip: NormClip | None
) -> tuple[Any, StepResult]:
    """Step with the present gradients."""
    state.begin_call()
    if clip is not None and clip.error_if_nonfinite:
        clip.refuse_nonfinite(state.measure(unscale=False, norm_type=clip.norm_type)[0])
    plan = choose(optimizer, why_not, scales=state.shared.enabled)
    scales, is_one_pass = state.scales_carried(), isinstance(plan, OnePass)
    # If the gradients have several loss scales, no single divisor fits all gradients.
    divides = plan.divides and len(scales) == 1
    if not is_one_pass:
        match_memory_order(optimizer)
    norm_type = state.norm_type if clip is None else clip.norm_type
    norm, found = state.measure(unscale=not divides, norm_type=norm_type)
    norm, found, factor, judged = state.judge(norm, found, in_place=not is_one_pass)
    scale = next(iter(scales)) if divides else None
    divisor = None if scale is None else scale.require()
    if factor is not None:
        divisor = factor.reciprocal() if divisor is None else divisor / factor
    if clip is not None and is_one_pass:
        divisor = clip.divisor(norm, found, divisor_of(None, norm.device)[0] if divisor is None else divisor)
    elif clip is not None:
        clip_measured(state, clip, norm, found)
    value, skipped = plan.take(state, call, found, divisor)
    max_norm = None if clip is None else clip.max_norm
    return value, state.close(
        norm, found, judged, known=skipped, how=plan.how, one_pass=is_one_pass, max_norm=max_norm
    )


def take_step_by(
    core: ScalerCore, state: OptimizerState, maybe_step: Callable[[], Any]
) -> tuple[Any, StepResult]:
    """Unscale and check the gradients, and call the program's own ``_maybe_opt_step``.

    The host waits for the device.
    """
    if core.is_step_refused(state):
        raise RuntimeError(_NO_UPDATE)
    state.begin_call()
    norm, found, _, judged = state.judge(*state.measure(unscale=True))
    value = state.run_step(maybe_step)
    how = "the program's own _maybe_opt_step"
    result = state.close(norm, found, judged, known=bool(found.item() > 0), how=how)
    core.log.add(state.optimizer, result)
    return value, result


def refuse_nothing_checked(core: ScalerCore, state: OptimizerState) -> None:
    """Raise AssertionError, as torch.amp does, if an optimizer has no gradient that can be checked.

    Unlike in torch.amp, an optimizer may step without gradients if another optimizer has gradients, as in a
    GAN, or if another rank may have gradients. Under Lightning and Accelerate an optimizer may also step
    without gradients in a batch without a loss. If an optimizer object has neither parameters nor gradients,
    an error is raised, because the object may be a mock that wraps an optimizer with scaled gradients.
    """
    nothing = not state.found_inf_per_device and not state.ledger.has_gradients()
    has_no_loss = core.shared.scales_all and bool(state.params) and not state.is_awaited
    if not (core.shared.enabled and nothing) or has_no_loss or state.spans_ranks:
        return
    # Parameters with gradients may have been added to another optimizer in the meantime.
    core.refresh_joined()
    if not state.params or not any(_has_checked(other) for other in core if other is not state):
        raise AssertionError(_NOTHING_CHECKED.format(kind=type(state.optimizer).__name__))


def _has_checked(state: OptimizerState) -> bool:
    """Return whether an optimizer has gradients, or has used some since the last scaled backward pass."""
    return bool(state.ledger.has_gradients()) or (state.backwards > 0 and not state.is_awaited)


def _take_unchecked(
    core: ScalerCore, optimizer: Optimizer, args: Any, kwargs: dict[str, Any], clip: NormClip | None
) -> tuple[Any, StepResult]:
    """Take torch's own step with torch's own clip, because no option asks for a check of gradients."""
    closure: Any = kwargs.get("closure")
    if clip is not None and closure is None:
        core.state(optimizer).replace_norm(clip.by_torch(params_of(optimizer)))
    elif clip is not None:

        def run() -> Any:
            with torch.enable_grad():
                loss = closure()
            clip.by_torch(params_of(optimizer))
            return loss

        kwargs = {**kwargs, "closure": run}
    value = optimizer.step(*args, **kwargs)
    return value, core.note_step(optimizer, "torch's own step (on_nonfinite='ignore')")


def _take_closure(args: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any] | None, Any, dict[str, Any]]:
    """Split the arguments of ``step`` into the closure, if there is one, and the other arguments."""
    if callable(kwargs.get("closure")):
        rest = dict(kwargs)
        return rest.pop("closure"), args, rest
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        return args[0], args[1:], kwargs
    return None, args, kwargs
