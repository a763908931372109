"""Weights that are frozen in 16 bits when a model is set up, and trained later.

Before the first forward pass that trains them they become what they would have become at set-up: stored, or
float32. Parameters in 16 bits that this does not reach are warned of once, at their first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.weight import stored_weight

_ATTRIBUTE: Final = "_amp_plugin_warns_of_16_bits"
SetUp = Callable[[nn.Module, list[nn.Parameter]], None]


class FrozenWeights:
    """A forward pre-hook of a model: sets up, by ``set_up``, its weights in 16 bits that are trained now."""

    def __init__(self, set_up: SetUp) -> None:
        self._set_up = set_up

    def __call__(self, model: nn.Module, args: object = ()) -> None:
        """Set up those that are trained now."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        params = [param for param in model.parameters() if _is_left(param) and _is_whole(param)]
        if any(param.requires_grad for param in params):
            self._set_up(model, [param for param in params if param.requires_grad])


def set_up_when_unfrozen(model: nn.Module, set_up: SetUp) -> FrozenWeights | None:
    """Let a model's frozen weights in 16 bits be set up when they are trained; any number of calls.

    Returns:
        What does it before each forward pass of the model; whoever trains without that calls it with the
        model. None if no weight is frozen in 16 bits.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FrozenWeights):
            return hook
    if not any(map(_is_left, model.parameters())):
        return None
    frozen = FrozenWeights(set_up)
    model.register_forward_pre_hook(frozen)
    return frozen


def forget_frozen(model: nn.Module) -> None:
    """End :func:`set_up_when_unfrozen`."""
    for number, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, FrozenWeights):
            del model._forward_pre_hooks[number]


def warn_of_16_bits(optimizer: Optimizer) -> None:
    """Warn once when an optimizer steps parameters in 16 bits, and widen those that load float32 state."""
    if not hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, False)  # not warned of yet
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_load_state_dict_pre_hook(_before_load)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Widen weights that have state in float32: torch would cast it to their 16 bits."""
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    for number, param in enumerate(params):
        state = state_dict["state"].get(number, {}).values()
        in_fp32 = any(isinstance(v, Tensor) and v.dtype is torch.float32 and v.dim() > 0 for v in state)
        if in_fp32 and _is_left(param) and _is_whole(param):
            widen_(param)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, _ATTRIBUTE, True):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    count = sum(_is_left(param) and param.grad is not None for param in params)
    if count:
        setattr(optimizer, _ATTRIBUTE, True)
        warn_user(
            f"{count} parameters in 16 bits were frozen, or not made yet, when the model was set up, so that "
            f"they did not become float32, and {type(optimizer).__name__} steps them now: updates below "
            "1/256 of a weight (1/2048 in float16) are lost. Unfreeze or make them before the model is set up"
        )


_after_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass


def _is_left(param: Tensor) -> bool:
    """Whether a parameter is in 16 bits, and not stored."""
    return param.dtype in HALVES and stored_weight(param) is None


def _is_whole(param: Tensor) -> bool:
    """Whether a parameter is a tensor of its own; a part of FSDP's flat one must keep its memory."""
    if type(param).__name__ == "DTensor":
        return False
    return param.untyped_storage().nbytes() == param.numel() * param.element_size()


@torch.no_grad()
def widen_(param: Tensor) -> None:
    """Make a parameter float32, in place, and the gradient that it has."""
    grad, param.grad = param.grad, None
    param.data = param.data.float()
    param.grad = None if grad is None else grad.float()
