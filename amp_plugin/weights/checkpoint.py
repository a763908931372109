"""State dicts of stored models are those of float32 models, in both directions; entries of 0.2 still load.

They are copies: what is written into a state dict of a stored model does not reach the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.weight import (
    StoredWeight,
    assigned,
    exact_value,
    fp32_shown,
    has_room,
    stored_params,
    stored_weight,
)

_ENTRY_OF_0_2: Final = "amp_plugin_weights"


def export_fp32(model: nn.Module) -> None:
    """Let the modules of a model that own stored parameters save and load them in float32."""
    for module in model.modules():
        if not stored_params(module.parameters(recurse=False)):
            continue
        if _after_state_dict not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_after_state_dict)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


def export_as_is(model: nn.Module) -> None:
    """End :func:`export_fp32`."""
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for number, hook in list(hooks.items()):
                if getattr(hook, "hook", hook) in {_after_state_dict, _before_load}:
                    del hooks[number]


def _after_state_dict(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """Put float32 in the place of 16 bits; variables (``keep_vars=True``) stay what they are."""
    for name, param in module._parameters.items():
        weight = None if param is None else stored_weight(param)
        if weight is None or weight.shows or isinstance(state_dict.get(prefix + name), nn.Parameter):
            continue
        if prefix + name in state_dict:
            state_dict[prefix + name] = _exported(param, weight, state_dict)


def _exported(param: Any, weight: StoredWeight, state_dict: Any) -> Tensor:
    """Return the float32 copy of a parameter, the same one for all its names in a state dict."""
    if weight.exported is not None:
        into, copy = (reference() for reference in weight.exported)
        if into is state_dict and copy is not None:
            return copy
    if not has_room(param):
        warn_user(
            f"the state dict is made on the host, tensor by tensor: {param.device} has no room for a float32 "
            "copy of the weights that leaves an eighth of its memory to the run"
        )
    value = exact_value(param)
    if type(state_dict) is not dict:  # of which no weak reference can be had
        weight.exported = ref(state_dict), ref(value)
    return value


@torch.no_grad()
def _before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Split what a module is about to load; of a value in 16 bits nothing is kept beside it."""
    for name, param in module._parameters.items():
        weight = None if param is None else stored_weight(param)
        value = state_dict.get(prefix + name)
        if weight is None or weight.shows or not isinstance(value, Tensor) or value.shape != param.shape:  # type: ignore[union-attr]
            continue
        if not value.is_floating_point() or value.is_meta:
            continue
        exact = value.detach().float()
        if metadata.get("assign_to_params_buffers", False):
            state_dict[prefix + name] = assigned(param, exact)  # type: ignore[arg-type]
            continue
        state_dict[prefix + name], kept = weight.format.split(exact)
        weight.kept = kept.to(param.device)  # type: ignore[union-attr]


@torch.no_grad()
def load_entry_of_0_2(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Add to the weights what a checkpoint of 0.2 kept beside them; its model is loaded by now.

    There the model's state dict held the 16 bits, and the optimizer's what they lacked. A weight that is not
    the one that was saved is left as it is.

    Args:
        optimizer: Of float32 weights, or of stored ones.
        state_dict: Of an optimizer.
    """
    entry = state_dict.get(_ENTRY_OF_0_2)
    if entry is None:
        return
    params = list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
    with fp32_shown(params):
        for number, saved in entry["rests"].items():
            param = params[number]
            if param.dtype is not torch.float32 or saved.shape != param.shape:
                continue
            kept, high, whole = saved.to(param.device), param.bfloat16(), torch.empty_like(param)
            if kept.dtype is torch.float32:
                same, whole = kept.half().float() == param, kept
            else:
                same = high.float() == param
                torch.ops.amp_plugin.unpack_weights_([high], [kept], [whole])
            param.copy_(torch.where(same, whole, param))
