"""Clip unscaled gradients, whatever unit they are in when asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.folded_clip import FoldedClip
from amp_plugin.scaling.fused import foldable
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.shard_layout import parameter_layouts
from amp_plugin.scaling.shared import Shared

Target = Optimizer | Tensor | Iterable[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class NormClip:
    """A clip by norm that is asked for, its arguments checked.

    Attributes:
        max_norm: Largest norm.
        norm_type: The p of the norm.
        error_if_nonfinite: Raise if the norm is not finite.
        fold: Leave it to the step, where that can clip.
    """

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    fold: bool

    def refuse_nonfinite(self, norm: Tensor) -> None:
        """Raise if that is asked for and the norm is not finite: a host sync.

        Raises:
            RuntimeError: It is not.
        """
        if self.error_if_nonfinite and not torch.isfinite(norm).item():
            msg = (
                f"The total norm of order {self.norm_type} for gradients is non-finite, so it cannot be "
                "clipped. With a loss scale this happens at times, the step is skipped: leave "
                "error_if_nonfinite=False."
            )
            raise RuntimeError(msg)


def clip_norm(registry: Registry, shared: Shared, target: Target, clip: NormClip) -> Tensor:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_norm_` tells."""
    shared.scales.require("clip_grad_norm_")
    window = registry.window(target) if isinstance(target, Optimizer) else None
    if window is not None:
        window.begin_call()
        norm, folded = _norm_of_window(window, clip)
        sets = window.sets
    else:
        folded = False
        params = params_in(target)
        norm, sets = _norm_of_params(registry, shared, params, clip.norm_type)
    clip.refuse_nonfinite(norm)
    if window is not None and folded:
        window.clip = FoldedClip(norm, clip.max_norm, clip.norm_type, window.clip)
        return norm
    factor = torch.ops.amp_plugin.clip_factor(norm, clip.max_norm)
    for gradients in sets:
        gradients.clip_(factor, clip.norm_type)
    for clipped in _windows_of(registry, params) if window is None else [window]:
        clipped.note_clipped()
    return norm


def clip_value(registry: Registry, target: Target, limit: float) -> None:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_value_` tells; ``limit`` is checked."""
    params = params_in(target)
    windows = [registry.window(target)] if isinstance(target, Optimizer) else _windows_of(registry, params)
    for window in windows:
        window.begin_call()
        window.unscale_()
    clip_value_of(params, limit)


def clip_value_of(params: list[Tensor], limit: float) -> None:
    """Clip every element of gradients as they are."""
    if any(param.grad is not None for param in params):  # torch's fails if there is none
        torch.nn.utils.clip_grad_value_(params, limit)


def _norm_of_window(window: OptimizerWindow, clip: NormClip) -> tuple[Tensor, bool]:
    """Return the norm of unscaled gradients, and whether they are left scaled for a folded clip."""
    if not (clip.fold and foldable(window) is not None):
        return window.unscale_(clip.norm_type)[0], False
    norm, _ = window.check(write=False, norm_type=clip.norm_type)
    return (norm if window.clip is None else norm * window.clip.factor()), True


def _norm_of_params(
    registry: Registry, shared: Shared, params: list[Tensor], norm_type: float
) -> tuple[Tensor, list[GradientSet]]:
    """Unscale the gradients of the optimizers that step the parameters; return their norm and the sets."""
    windows = _windows_of(registry, params)
    for window in windows:
        window.begin_call()
        norm, _ = window.unscale_(norm_type)
    if len(windows) == 1 and set(map(id, windows[0].params)) == set(map(id, params)):
        return norm, windows[0].sets
    own = GradientSet(params, frozenset())
    layouts, device = parameter_layouts(params), shared.scales.device
    return shared.ranks.combine(own.measure(norm_type), norm_type, device, layouts)[0], [own]


def _windows_of(registry: Registry, params: list[Tensor]) -> list[OptimizerWindow]:
    windows, unknown = registry.windows_of(params)
    if unknown:
        msg = (
            f"clip: {unknown} of the parameters belong to no optimizer this scaler knows, so the scale "
            "of their gradients is unknown; call scaler.register(optimizer) first, or pass the optimizer."
        )
        raise RuntimeError(msg)
    return windows


def limit(name: str, given: object) -> float:
    """Return a limit of clipping as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative or nan.
    """
    value = number(name, given)
    if not value >= 0:
        msg = f"clip: {name}={given!r} is not allowed; give a number that is not negative"
        raise ValueError(msg)
    return value


def number(name: str, given: Any) -> float:
    """Return an argument of clipping as a float.

    Raises:
        TypeError: It is no number.
    """
    try:
        return float(given)
    except (TypeError, ValueError):
        order = "; the optimizer or its parameters come first" if isinstance(given, Optimizer) else ""
        msg = f"clip: {name}={_short(given)} is not allowed; give a number{order}"
        raise TypeError(msg) from None


def params_in(target: Target) -> list[Tensor]:
    """Return the parameters that are to be clipped.

    Raises:
        TypeError: ``target`` is neither an optimizer nor parameters.
    """
    if isinstance(target, Optimizer):
        return list(params_of(target))
    if isinstance(target, Tensor):
        return [target]
    given: object = target
    advice = ""
    if isinstance(target, torch.nn.Module):
        advice = ": give its parameters()"
    elif isinstance(target, Iterable):
        params = list(target)
        given = next((item for item in params if not isinstance(item, Tensor)), None)
        if given is None:
            return params
        advice = ": give parameters() instead of named_parameters()" if isinstance(given, tuple) else ""
    msg = f"clip: an optimizer or parameters are wanted, got {_short(given)}{advice}"
    raise TypeError(msg)


def _short(given: object) -> str:
    plain = given is None or isinstance(given, (str, int, float))
    return repr(given) if plain else type(given).__name__
