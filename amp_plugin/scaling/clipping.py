"""Clip unscaled gradients, whatever unit they are in when asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.gradients import parameter_layouts, params_of
from amp_plugin.scaling.one_pass import OPTIMIZERS, unavailable
from amp_plugin.scaling.per_optimizer import MeasuredClip, PerOptimizerState, Shared
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.steps import is_fused, may_be_left_to_kernel
from amp_plugin.scaling.unscaling import GradientGroup

Target = Optimizer | Tensor | Iterable[Tensor]


class NormClip(NamedTuple):
    """A clip by norm that is asked for, its arguments checked."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    fold: bool  # leave it to the step, where that can clip

    def refuse_nonfinite(self, norm: Tensor) -> None:
        """Raise if that is asked for and the norm is not finite: a host sync."""
        if self.error_if_nonfinite and not torch.isfinite(norm).item():
            msg = (
                f"The total norm of order {self.norm_type} for gradients is non-finite, so it cannot be "
                "clipped. With a loss scale this happens at times, the step is skipped: leave "
                "error_if_nonfinite=False."
            )
            raise RuntimeError(msg)


def clip_norm(registry: Registry, target: Target, clip: NormClip) -> Tensor:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_norm_` does."""
    shared = registry.shared
    params, states, is_one = _owners(registry, target, "clip_grad_norm_")
    if not (shared.scales.enabled or (shared.checks and shared.one_pass)):  # torch's last bits are wanted
        if is_one:
            states[0].begin_clip()
        else:
            _write(shared, params, states)
        norm = torch.nn.utils.clip_grad_norm_(params, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        if is_one:
            states[0].take_norm(norm, clip.norm_type)
        for state in states:
            state.note_written()
        return norm
    if is_one:
        return _clip_state(states[0], shared, clip, fold=clip.fold and isinstance(target, Optimizer))
    _write(shared, params, states)
    own = GradientGroup(params, frozenset(), remembers=False)
    device = shared.scales.device or next((param.device for param in params), torch.device("cpu"))
    measured = own.measure(clip.norm_type)
    norm, found = shared.ranks.combine(measured, clip.norm_type, device, parameter_layouts(params))
    clip.refuse_nonfinite(norm)
    own.clip_(MeasuredClip(norm, found, clip.max_norm, clip.norm_type).factor(), clip.norm_type)
    for state in states:
        state.has_written_clip = True
        state.note_written()
    return norm


def _clip_state(state: PerOptimizerState, shared: Shared, clip: NormClip, *, fold: bool) -> Tensor:
    """Clip all gradients of one optimizer, or leave the clip to its step."""
    state.begin_clip()
    fold = fold and _may_fold(state, shared)
    if fold:
        state.write_clip()
        norm, found = state.measure(unscale=False, norm_type=clip.norm_type)
    else:
        norm, found = state.unscale_(clip.norm_type)
    clip.refuse_nonfinite(norm)
    measured = MeasuredClip(norm, found, clip.max_norm, clip.norm_type)
    if fold:
        state.folded_clip = measured
        return norm
    factor = measured.factor()
    for gradients in state.groups:
        gradients.clip_(factor, clip.norm_type)
    state.has_written_clip = True
    return norm


def _may_fold(state: PerOptimizerState, shared: Shared) -> bool:
    """Whether the optimizer's step can work a clip in; if it then cannot, the clip is written there."""
    has_op = type(state.optimizer).__name__ in OPTIMIZERS and not unavailable(state.device().type)
    has_kernel = is_fused(state.optimizer) or (shared.one_pass and has_op)
    on_one_scale = shared.scales.enabled == (state.scales_carried() != {None})
    return has_kernel and on_one_scale and may_be_left_to_kernel(state)


def clip_value(registry: Registry, target: Target, limit: float) -> None:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_value_` does; ``limit`` is checked."""
    params, states, _ = _owners(registry, target, "clip_grad_value_")
    _write(registry.shared, params, states)
    if any(param.grad is not None for param in params):  # torch's fails if there is none
        torch.nn.utils.clip_grad_value_(params, limit)
        for state in states:
            state.note_written()


def _owners(registry: Registry, target: Any, call: str) -> tuple[list[Tensor], list[PerOptimizerState], bool]:
    """Return the parameters to clip, whose they are, and whether one optimizer has these and no others."""
    if registry.shared.scales.enabled:
        registry.shared.scales.require(call)
    if isinstance(target, Optimizer):
        return list(params_of(target)), [registry.state(target)], True
    params = _params_in(target)
    states = registry.owners(params)
    exactly = [state for state in states if state.has_exactly(params)]
    return (params, exactly, True) if len(exactly) == 1 else (params, states, False)


def _write(shared: Shared, params: list[Tensor], states: list[PerOptimizerState]) -> None:
    """Unscale and measure the gradients of optimizers, and write clips that were left to their steps."""
    if not (shared.scales.enabled or shared.checks):
        return
    owned = {id(param) for state in states for param in state.params}
    unknown = sum(param.grad is not None and id(param) not in owned for param in params)
    if unknown and shared.scales.enabled:
        msg = (
            f"clip: {unknown} of the parameters belong to no optimizer this scaler knows, so the scale "
            "of their gradients is unknown; call scaler.register(optimizer) first, or pass the optimizer; "
            "in Accelerate accelerator.prepare(optimizer)."
        )
        raise RuntimeError(msg)
    for state in states:
        state.begin_clip()
        state.unscale_()


def number(name: str, given: Any, *, least: float = -math.inf) -> float:
    """Return an argument of clipping as a float."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        msg = (
            f"clip: {name} must be a number, got {type(given).__name__}; "
            "the optimizer or its parameters come first"
        )
        raise TypeError(msg) from None
    if not value >= least:
        what = "a number that is not negative" if least == 0 else "a number"
        msg = f"clip: {name}={given!r} is not allowed; give {what}"
        raise ValueError(msg)
    return value


def _params_in(target: Any) -> list[Tensor]:
    given = [target] if isinstance(target, Tensor) or not isinstance(target, Iterable) else list(target)
    wrong = next((type(item).__name__ for item in given if not isinstance(item, Tensor)), None)
    if wrong is not None:
        msg = f"clip: an optimizer or parameters are wanted, got {wrong}; give model.parameters()"
        raise TypeError(msg)
    return given
