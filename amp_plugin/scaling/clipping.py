"""Clip unscaled gradients, whatever unit they are in when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.gradient_group import GradientGroup
from amp_plugin.scaling.gradients import parameter_layouts, params_of
from amp_plugin.scaling.one_pass import OPTIMIZERS, unavailable
from amp_plugin.scaling.per_optimizer import FoldedClip, PerOptimizerState, Shared, clip_factor
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.steps import is_fused, may_be_left_to_kernel

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


def clip_norm(registry: Registry, shared: Shared, target: Target, clip: NormClip) -> Tensor:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_norm_` does."""
    if shared.scales.enabled:
        shared.scales.require("clip_grad_norm_")
    state, params = _state_and_params(registry, target)
    if not (shared.scales.enabled or (shared.checks and shared.one_pass)):  # torch's last bits are wanted
        norm = torch.nn.utils.clip_grad_norm_(params, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        if state is not None:
            state.norm = norm
        return norm
    if state is not None:
        return _clip_state(state, shared, clip, fold=clip.fold and isinstance(target, Optimizer))
    states = _states_written(registry, shared, params)
    own = GradientGroup(params, frozenset(), remembers=False)
    device = shared.scales.device or next((param.device for param in params), torch.device("cpu"))
    measured = own.measure(clip.norm_type)
    norm, found = shared.ranks.combine(measured, clip.norm_type, device, parameter_layouts(params))
    clip.refuse_nonfinite(norm)
    own.clip_(clip_factor(norm, found, clip.max_norm), clip.norm_type)
    for known in states:
        known.is_clipped = True
    return norm


def _clip_state(state: PerOptimizerState, shared: Shared, clip: NormClip, *, fold: bool) -> Tensor:
    """Clip all gradients of one optimizer, or leave the clip to its step."""
    state.begin_call()
    state.forget_dropped_clip()
    if not shared.scales.enabled:
        state.norm = None  # of the last clip
    if fold and _may_fold(state, shared):
        state.write_clip()
        norm, found = state.check(write=False, norm_type=clip.norm_type)
        clip.refuse_nonfinite(norm)
        state.clip = FoldedClip(norm, found, clip.max_norm, clip.norm_type)
        return norm
    norm, found = state.unscale_(clip.norm_type)
    clip.refuse_nonfinite(norm)
    factor = clip_factor(norm, found, clip.max_norm)
    for gradients in state.groups:
        gradients.clip_(factor, clip.norm_type)
    state.is_clipped = True
    return norm


def _may_fold(state: PerOptimizerState, shared: Shared) -> bool:
    """Whether the optimizer's step can work a clip in; if it then cannot, the clip is written there."""
    has_op = type(state.optimizer).__name__ in OPTIMIZERS and not unavailable(state.device().type)
    has_kernel = is_fused(state.optimizer) or (shared.one_pass and has_op)
    on_one_scale = shared.scales.enabled == (state.scales_carried() != {None})
    return has_kernel and on_one_scale and may_be_left_to_kernel(state)


def clip_value(registry: Registry, shared: Shared, target: Target, limit: float) -> None:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_value_` does; ``limit`` is checked."""
    state, params = _state_and_params(registry, target)
    _states_written(registry, shared, params, state)
    if any(param.grad is not None for param in params):  # torch's fails if there is none
        torch.nn.utils.clip_grad_value_(params, limit)


def _state_and_params(registry: Registry, target: Target) -> tuple[PerOptimizerState | None, list[Tensor]]:
    """Return the parameters to clip, and the optimizer that has these and no others."""
    if isinstance(target, Optimizer):
        return registry.state(target), list(params_of(target))
    params = _params_in(target)
    owners = registry.optimizers_of_exactly(params)
    return (registry.state(owners[0]) if len(owners) == 1 else None), params


def _states_written(
    registry: Registry, shared: Shared, params: list[Tensor], owner: PerOptimizerState | None = None
) -> list[PerOptimizerState]:
    """Return whose parameters are clipped, once their gradients are unscaled and folded clips written."""
    enabled = shared.scales.enabled
    states, unknown = registry.states_of(params) if owner is None else ([owner], 0)
    if unknown and enabled:
        msg = (
            f"clip: {unknown} of the parameters belong to no optimizer this scaler knows, so the scale "
            "of their gradients is unknown; call scaler.register(optimizer) first, or pass the optimizer; "
            "in Accelerate accelerator.prepare(optimizer)."
        )
        raise RuntimeError(msg)
    for state in states:
        if enabled:
            state.begin_call()
            state.unscale_()
        else:
            state.write_clip()
    return states


def number(name: str, given: Any, *, least: float | None = None) -> float:
    """Return an argument of clipping as a float."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        order = "; the optimizer or its parameters come first" if isinstance(given, Optimizer) else ""
        msg = f"clip: {name}={_short(given)} is not allowed; give a number{order}"
        raise TypeError(msg) from None
    if least is not None and not value >= least:
        msg = f"clip: {name}={given!r} is not allowed; give a number that is not negative"
        raise ValueError(msg)
    return value


def _params_in(target: Tensor | Iterable[Tensor]) -> list[Tensor]:
    given: object = target
    advice = ""
    if isinstance(target, Tensor):
        return [target]
    if isinstance(target, torch.nn.Module):
        advice = ": give its parameters()"
    elif isinstance(target, Iterable):
        params = list(target)
        given = next((item for item in params if not isinstance(item, Tensor)), None)
        if given is None:
            return params
        advice = ": give parameters() instead of named_parameters()" * isinstance(given, tuple)
    msg = f"clip: an optimizer or parameters are wanted, got {_short(given)}{advice}"
    raise TypeError(msg)


def _short(given: object) -> str:
    plain = given is None or isinstance(given, (str, int, float))
    return repr(given) if plain else type(given).__name__
