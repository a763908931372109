"""Clips gradients in place. Scaled gradients are unscaled first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.core import ScalerCore
from amp_plugin.scaling.gradients import measured, multiply_, parameter_layouts, params_of
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.shared import Shared

Target = Optimizer | Tensor | Iterable[Tensor]

_NONFINITE = (
    "The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. With a loss "
    "scale this happens at times, and the step is skipped: leave error_if_nonfinite=False."
)

_UNKNOWN = (
    "clip: {count} of the parameters belong to no optimizer this scaler knows, so the scale of their "
    "gradients is unknown; call {prepare} first, or pass the optimizer."
)


class NormClip(NamedTuple):
    """The checked arguments for clipping by norm."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    @classmethod
    def of(cls, max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> NormClip:
        """Check the user's arguments, and return them as floats."""
        limit = number("max_norm", max_norm, least=0)
        return cls(limit, number("norm_type", norm_type), bool(error_if_nonfinite))

    def divisor(self, norm: Tensor, found: Tensor, scale: Tensor) -> Tensor:
        """Return the number by which gradients must be divided to unscale and clip them (float32, 0-dim).

        Args:
            norm: The norm of the unscaled gradients.
            found: 1.0 if the step is skipped, else 0.0. A skipped step unscales the gradients without a clip.
            scale: The number by which the gradients are multiplied.
        """
        return torch.ops.amp_plugin.clip_factor(norm, self.max_norm, scale, found)  # type: ignore[no-any-return]

    def refuse_nonfinite(self, norm: Tensor) -> None:
        """Raise if the norm is not finite and ``error_if_nonfinite`` is set. This is a host sync."""
        if self.error_if_nonfinite and not torch.isfinite(norm).item():
            raise RuntimeError(_NONFINITE.format(norm_type=self.norm_type))

    def by_torch(self, params: Iterable[Tensor]) -> Tensor:
        """Clip with torch's own function, so that the result is bitwise equal to torch's. Return the norm."""
        return torch.nn.utils.clip_grad_norm_(params, self.max_norm, self.norm_type, self.error_if_nonfinite)


def clip_norm(core: ScalerCore, target: Target, clip: NormClip) -> Tensor:
    """Clip the norm of gradients, for :meth:`amp_plugin.GradScaler.clip_grad_norm_`."""
    shared = core.shared
    params, states, is_one = _owners(core, target, "clip_grad_norm_")
    if is_one:
        states[0].forget_stale_norm()
    else:
        _unscale(core, params, states)
    if wants_torchs_bits(shared):
        norm = clip.by_torch(params)
        if is_one:
            states[0].take_norm(norm, clip.norm_type)
    elif is_one:
        norm, found = states[0].unscale_(clip.norm_type, on_request=False)
        clip.refuse_nonfinite(norm)
        clip_measured(states[0], clip, norm, found)
        return norm
    else:
        found_now, device = measured(params, None, clip.norm_type), shared.device_for(params)
        norm, found = shared.ranks.combine(found_now, clip.norm_type, device, parameter_layouts(params))
        clip.refuse_nonfinite(norm)
        multiply_(params, norm, clip.max_norm, found)
    for state in states:
        state.ledger.look_again()
    return norm


def wants_torchs_bits(shared: Shared) -> bool:
    """Return whether to clip with torch's own function.

    Torch's function is used if no loss is scaled and the optimizer's own step is called.
    """
    return not (shared.enabled or (shared.checks and shared.options.one_pass))


def clip_measured(state: OptimizerState, clip: NormClip, norm: Tensor, found: Tensor) -> None:
    """Clip all gradients of one optimizer, given their norm, unless ``found`` is 1."""
    if wants_torchs_bits(state.shared):
        clip.by_torch(state.params)
    else:
        state.ledger.write(partial(multiply_, state.params, norm, clip.max_norm, found))


def clip_value(core: ScalerCore, target: Target, limit: float) -> None:
    """Clip each element of gradients, for :meth:`amp_plugin.GradScaler.clip_grad_value_`."""
    params, states, _ = _owners(core, target, "clip_grad_value_")
    _unscale(core, params, states)
    if any(param.grad is not None for param in params):  # torch's fails if there is none
        torch.nn.utils.clip_grad_value_(params, limit)
        for state in states:
            state.ledger.look_again()


def _owners(core: ScalerCore, target: Any, call: str) -> tuple[list[Tensor], list[OptimizerState], bool]:
    """Find the optimizers of the parameters that will be clipped.

    Returns:
        The parameters, the states of their optimizers, and whether one optimizer has exactly these
        parameters.
    """
    params = list(params_of(target)) if isinstance(target, Optimizer) else _params_in(target)
    if core.shared.enabled:
        core.shared.require_scale(call, params)
    if isinstance(target, Optimizer):
        return params, [core.state(target)], True
    states = core.owners(params)
    wanted = set(map(id, params))
    exactly = [state for state in states if wanted == set(map(id, state.params))]
    return (params, exactly, True) if len(exactly) == 1 else (params, states, False)


def _unscale(core: ScalerCore, params: list[Tensor], states: list[OptimizerState]) -> None:
    """Unscale the gradients of these optimizers, and measure their norm."""
    if not (core.shared.enabled or core.shared.checks):
        return
    owned = {id(param) for state in states for param in state.params}
    unknown = sum(param.grad is not None and id(param) not in owned for param in params)
    if unknown and core.shared.enabled:
        raise RuntimeError(_UNKNOWN.format(count=unknown, prepare=core.shared.words.prepare))
    for state in states:
        state.forget_stale_norm()
        state.unscale_(on_request=False)


def number(name: str, given: Any, *, least: float = -math.inf) -> float:
    """Return a clipping argument as a float, or raise TypeError or ValueError."""
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
