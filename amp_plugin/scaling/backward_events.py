"""Know when a scaled backward begins: only it can bring scaled gradients.

Versions of tensors cannot tell a user's clipping from a backward that adds to a gradient;
a hook on the scaled output can. It runs before any gradient of that backward exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_plugin.scaling.loss_scale import LossScale

if TYPE_CHECKING:
    from amp_plugin.scaling.grad_scaler import GradScaler


def watch(output: Tensor, scaler: GradScaler, loss_scale: LossScale) -> None:
    """Let ``scaler`` know when a backward from ``output`` begins.

    Under ``torch.compile`` and functorch transforms nothing is watched: the scaler then takes the
    gradients that follow an ``update()`` for scaled ones, as torch's does.
    """
    if not output.requires_grad or torch.compiler.is_compiling():
        return
    if torch._C._functorch.maybe_current_level() is not None:
        return
    hook = partial(
        _begin,
        scaler=weakref.ref(scaler),
        loss_scale=loss_scale,
        generation=loss_scale.generation,
        snapshot=loss_scale.snapshot(),
    )
    output.register_hook(hook)  # type: ignore[no-untyped-call]


def is_watched(output: object) -> bool:
    """Return whether something is a loss that was scaled."""
    hooks = getattr(output, "_backward_hooks", None) or {}
    return any(isinstance(hook, partial) and hook.func is _begin for hook in hooks.values())


def _begin(
    grad: Tensor,
    *,
    scaler: weakref.ref[GradScaler],
    loss_scale: LossScale,
    generation: int,
    snapshot: Tensor,
) -> Tensor | None:
    """Tell the scaler; if the scale has changed since ``scale()``, correct what comes in."""
    owner = scaler()
    if owner is not None:
        owner._begin_backward(loss_scale)
    if loss_scale.generation == generation:
        return None
    change = loss_scale.require() / snapshot
    return grad * change.to(device=grad.device, dtype=grad.dtype)


def after_backward(call: Callable[[], None]) -> None:
    """Run ``call`` when the present backward is over, after the reducers' own callbacks.

    DDP and FSDP queue theirs while the backward runs, so a callback that queues the call once more
    comes behind them.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))
