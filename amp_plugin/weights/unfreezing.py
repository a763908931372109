"""Weights that are frozen in 16 bits when a model is set up, and trained later.

Before the first forward pass that trains them they become what they would have become at set-up: stored, or
float32. Parameters in 16 bits that this does not reach are warned of once, at their first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.weight import stored_weight

_ATTRIBUTE: Final = "_amp_plugin_warns_of_16_bits"
SetUp = Callable[[nn.Module, list[nn.Parameter]], None]


class FrozenWeights:
    """A model's frozen weights in 16 bits; a forward pre-hook of the model.

    The places of the parameters are kept, not the parameters: a weak reference to one makes
    ``torch.utils.swap_tensors`` fail, a strong one keeps it alive when the model has replaced it.

    Args:
        set_up: Sets up parameters of a model that are trained now.
    """

    def __init__(self, set_up: SetUp) -> None:
        self._set_up = set_up
        self._places: list[tuple[ref[nn.Module], str]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy with the model, to look for its weights again."""
        return FrozenWeights, (self._set_up,)

    def __call__(self, model: nn.Module, args: object = ()) -> None:
        """Set up those that are trained now.

        Args:
            model: The one whose hook this is.
            args: Of its forward pass, not looked at.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        params = [param for param in self._params(model) if param.requires_grad and is_whole(param)]
        if params:
            self._places = None
            self._set_up(model, params)

    def _params(self, model: nn.Module) -> Iterator[nn.Parameter]:
        if self._places is None:
            self._places = [
                (ref(module), name)
                for module in model.modules()
                for name, param in module.named_parameters(recurse=False)
                if _is_frozen(param)
            ]
        for module, name in self._places:
            owner = module()
            param = None if owner is None else owner._parameters.get(name)
            if param is not None and _is_frozen(param):
                yield param


def set_up_when_unfrozen(model: nn.Module, set_up: SetUp) -> FrozenWeights | None:
    """Let a model's frozen weights in 16 bits be set up when they are trained; any number of calls.

    Args:
        model: Its trainable weights are set up.
        set_up: Sets up parameters of a model that are trained now; picklable.

    Returns:
        What does it before each forward pass of the model; whoever trains without that calls it with the
        model. None if no weight is frozen in 16 bits.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FrozenWeights):
            return hook
    if not any(map(_is_frozen, model.parameters())):
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
    """Warn once when an optimizer steps parameters in 16 bits, and widen those that load float32 state.

    Args:
        optimizer: torch's, of a model with frozen weights in 16 bits.
    """
    if not hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, False)  # not warned of yet
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_load_state_dict_pre_hook(_before_load)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Widen weights that have state in float32: torch would cast it to their 16 bits."""
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    for number, param in enumerate(params):
        state = state_dict["state"].get(number, {})
        if _is_frozen(param) and is_whole(param) and any(map(_is_in_fp32, state.values())):
            widen_(param)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, _ATTRIBUTE, True):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    count = sum(_is_frozen(param) and param.grad is not None for param in params)
    if count:
        setattr(optimizer, _ATTRIBUTE, True)
        warn_user(
            f"{count} parameters in 16 bits were frozen, or not made yet, when the model was set up, so that "
            f"they did not become float32, and {type(optimizer).__name__} steps them now: updates below "
            "1/256 of a weight (1/2048 in float16) are lost. Unfreeze or make them before the model is set up"
        )


_after_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass


def _is_frozen(param: Tensor) -> bool:
    """Whether a parameter is in 16 bits, and not stored."""
    return param.dtype in HALVES and stored_weight(param) is None


def _is_in_fp32(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() > 0


def is_whole(param: Tensor) -> bool:
    """Whether a parameter is a tensor of its own; a part of FSDP's flat one must keep its memory."""
    if type(param).__name__ == "DTensor":
        return False
    return param.untyped_storage().nbytes() == param.numel() * param.element_size()


@torch.no_grad()
def widen_(param: Tensor) -> None:
    """Make a parameter float32, in place, and the gradient that it has."""
    grad, param.grad = param.grad, None
    param.data = param.data.float()
    if grad is not None:
        param.grad = grad.float()
