"""Weights in 16 bits that are frozen when a model is set up under ``"fp32"``, and trained later.

They become float32 before the first forward pass that trains them, so that no update is lost. What that does
not reach (parameters made later, shards, a compiled model) is warned of once, at its first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.conversion import HALVES, convert_to_fp32, widen_

_ATTRIBUTE = "_amp_plugin_tells_of_thawed"


class FrozenWeights:
    """A model's frozen weights in 16 bits; a forward pre-hook of the model.

    The places of the parameters are kept, not the parameters: a weak reference to one makes
    ``torch.utils.swap_tensors`` fail, a strong one keeps it alive when the model has replaced it.
    """

    def __init__(self) -> None:
        self._places: list[tuple[ref[nn.Module], str]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy with the model, to look for its weights anew."""
        return FrozenWeights, ()

    def __call__(self, model: nn.Module, args: object = ()) -> None:
        """Make float32 of those that are trained now.

        Args:
            model: The one whose hook this is.
            args: Of its forward pass, not looked at.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        thawed = [param for param in self._params(model) if param.requires_grad and _is_whole(param)]
        if thawed and (converted := convert_to_fp32(model, only=thawed)) is not None:
            self._places = None
            warn_user(str(converted))

    def _params(self, model: nn.Module) -> Iterator[nn.Parameter]:
        if self._places is None:
            self._places = [
                (ref(module), name)
                for module in model.modules()
                for name, param in module.named_parameters(recurse=False)
                if param.dtype in HALVES
            ]
        for module, name in self._places:
            owner = module()
            param = None if owner is None else owner._parameters.get(name)
            if param is not None and param.dtype in HALVES:
                yield param


def widen_when_thawed(model: nn.Module) -> FrozenWeights | None:
    """Let a model's frozen weights in 16 bits become float32 when they are trained; any number of calls.

    Args:
        model: Its trainable weights are float32.

    Returns:
        What does it before each forward pass of the model; whoever trains without that calls it with the
        model. None if no weight is frozen in 16 bits.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FrozenWeights):
            return hook
    if not any(param.dtype in HALVES for param in model.parameters()):
        return None
    frozen = FrozenWeights()
    model.register_forward_pre_hook(frozen)
    return frozen


def expect_thawed(optimizer: Optimizer) -> None:
    """Let an optimizer load what was saved of weights that had become float32; any number of calls.

    It also warns, once, when it steps weights in 16 bits.

    Args:
        optimizer: torch's, of a model whose trainable weights are float32 and some frozen ones are not.
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
        if param.dtype in HALVES and _is_whole(param) and any(map(_is_in_fp32, state.values())):
            widen_(param)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, _ATTRIBUTE, True):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    count = sum(param.dtype in HALVES and param.grad is not None for param in params)
    if count:
        setattr(optimizer, _ATTRIBUTE, True)
        warn_user(
            f"{count} parameters in 16 bits were frozen, or not made yet, when the model was set up, so that "
            f"they did not become float32, and {type(optimizer).__name__} steps them now: updates below "
            "1/256 of a weight (1/2048 in float16) are lost. Unfreeze or make them before the model is set "
            "up, or store them with weights='bf16' (with weights='fp16' in float16), which stores a weight "
            "when it is unfrozen"
        )


_after_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass


def _is_in_fp32(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() > 0


def _is_whole(param: Tensor) -> bool:
    """Whether a parameter is a tensor of its own; a part of FSDP's flat one must keep its memory."""
    if type(param).__name__ == "DTensor":
        return False
    return param.untyped_storage().nbytes() == param.numel() * param.element_size()
