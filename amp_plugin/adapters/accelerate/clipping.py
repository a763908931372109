"""Clip gradients that belong to prepared optimizers, and keep the norm for ``last_step``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate.refusals import naming_unprepared, refuse_before_backward
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of

Parameters = Optimizer | Tensor | Iterable[Tensor]


def parameters_of(given: Parameters) -> list[Tensor]:
    """Return the parameters of an optimizer, or those given as such."""
    if isinstance(given, Optimizer):
        return list(params_of(given))
    return [given] if isinstance(given, Tensor) else list(given)


def clip_norm(
    scaler: GradScaler, params: list[Tensor], max_norm: float, norm_type: float, *, fold: bool = False
) -> Tensor:
    """Clip the norm of unscaled gradients, and return it as it was before (0-dim, fp32).

    Args:
        scaler: the accelerator's.
        params: whose gradients are clipped.
        max_norm: largest norm.
        norm_type: the p of the norm.
        fold: leave the clip to the step if these are one optimizer's parameters.

    Raises:
        RuntimeError: no loss has been scaled yet, or parameters belong to no prepared optimizer.
    """
    refuse_before_backward(scaler, "clip_grad_norm_()")
    owners = scaler.optimizers_of(params) if fold else []
    target = owners[0] if len(owners) == 1 else params
    with naming_unprepared(scaler, params, "clip_grad_norm_()"):
        return scaler.clip_grad_norm_(target, max_norm, norm_type, fold=fold)


def clip_value(scaler: GradScaler, params: list[Tensor], largest: float) -> None:
    """Clip each element of unscaled gradients to [-largest, largest].

    Raises:
        RuntimeError: no loss has been scaled yet, or parameters belong to no prepared optimizer.
    """
    refuse_before_backward(scaler, "clip_grad_value_()")
    with naming_unprepared(scaler, params, "clip_grad_value_()"):
        scaler.clip_grad_value_(params, largest)


def norm_so_far(scaler: GradScaler, params: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the gradients within an accumulation window, unscaled (0-dim)."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
    scale = scaler.loss_scale.value
    return norm if scale is None else norm / scale


def note_norm(scaler: GradScaler, params: list[Tensor], norm: Tensor | None) -> None:
    """Keep a norm that Accelerate has measured for the optimizer that has these parameters."""
    if norm is not None:
        for optimizer in scaler.optimizers_of(params):
            scaler.measure(optimizer, norm)
