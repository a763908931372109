"""Optimizers that know nothing of loss scales: unscale, then step or skip."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from amp_plugin.scaling import sync_free
from amp_plugin.scaling.memory_order import match_memory_order
from amp_plugin.scaling.optimizer_window import OptimizerWindow


def step(
    window: OptimizerWindow,
    optimizer: Optimizer,
    args: Any,
    kwargs: dict[str, Any],
    *,
    without_sync: bool = False,
) -> Any:
    """Step unless a gradient is not finite; return what ``optimizer.step`` does, None if it was skipped.

    With ``without_sync`` the step is undone on the device, where that is possible, instead of waiting for it.
    """
    window.clip_again()
    norm, found = window.check(write=True)
    if without_sync and sync_free.possible(optimizer, found.device):
        value = sync_free.step(optimizer, found, args, kwargs)
        window.close(norm, found, known=None)
        return value
    skipped = bool(found.item() > 0)
    if not skipped:
        match_memory_order(optimizer)  # fused, and yet without AMP support: Adagrad in torch 2.11
    value = None if skipped else optimizer.step(*args, **kwargs)
    window.close(norm, found, known=skipped)
    return value
