"""Clip gradients that carry no scale: by torch's function, or left to a step in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling import clipping, guarded_one_pass
from amp_plugin.scaling.clipping import Target
from amp_plugin.scaling.guard import Guard
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.registry import Registry


def clip_norm(
    guard: Guard,
    registry: Registry,
    target: Target,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    fold: bool,
) -> Tensor:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_norm_` tells; the arguments are checked."""
    if fold and isinstance(target, Optimizer):
        folded = guarded_one_pass.fold_clip(guard, registry.window(target), max_norm, norm_type)
        if folded is not None:
            clipping.refuse_nonfinite(folded, norm_type, error_if_nonfinite)
            return folded
    params = clipping.params_in(target)
    for window in _with_folded_clips(registry):
        window.unscaled.write_clip_(window.params)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    known = [target] if isinstance(target, Optimizer) else registry.optimizers_of_exactly(params)
    for optimizer in known:
        registry.window(optimizer).unscaled.note_clip(norm, norm_type)
    return norm


def clip_value(registry: Registry, target: Target, limit: float) -> None:
    """Clip as :meth:`amp_plugin.GradScaler.clip_grad_value_` tells; the arguments are checked."""
    for window in _with_folded_clips(registry):
        window.unscaled.write_clip_(window.params)
    clipping.clip_value_of(clipping.params_in(target), limit)


def _with_folded_clips(registry: Registry) -> Iterator[OptimizerWindow]:
    return (window for window in registry if window.unscaled.clip is not None)
