"""Skip a step on the device: step always, then put the old values back if it overflowed.

For optimizers that know nothing of loss scales. Costs a copy of parameters and state and one
select pass; saves the wait for the overflow flag. The first step of a parameter is taken the
ordinary way, since it makes the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.weights.weight import stored_weight


def possible(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step can be undone on the device.

    Args:
        optimizer: Its state must exist for every parameter with a gradient, or it keeps none.
        device: Where the overflow flag is.

    Raises:
        RuntimeError: The optimizer keeps state that is no tensor, or on another device.
    """
    stepping = [param for param in params_of(optimizer) if param.grad is not None]
    with_state = [param for param in stepping if optimizer.state.get(param)]
    for param in with_state:
        for name, value in optimizer.state[param].items():
            if value is not None and not (isinstance(value, Tensor) and value.device == device):
                raise RuntimeError(_not_selectable_text(optimizer, name, value, device))
    for name, value in _beside_params(optimizer).items():
        if isinstance(value, Tensor) and value.device != device and name.startswith("state."):
            raise RuntimeError(_not_selectable_text(optimizer, name.removeprefix("state."), value, device))
    if len(with_state) == len(stepping):
        return True
    return not with_state and _keeps_no_state(optimizer)


def _keeps_no_state(optimizer: Optimizer) -> bool:
    plain_sgd = isinstance(optimizer, torch.optim.SGD)
    return plain_sgd and not any(group["momentum"] for group in optimizer.param_groups)


def _not_selectable_text(optimizer: Optimizer, name: str, value: Any, device: torch.device) -> str:
    where = f"on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    way_out = "capturable=True to the optimizer, or " if "capturable" in optimizer.defaults else ""
    return (
        f"sync_free=True: the state {name!r} of {type(optimizer).__name__} is {where}, which cannot be "
        f"put back on {device} without a sync; pass {way_out}sync_free=False."
    )


@torch.no_grad()
def step(optimizer: Optimizer, found_inf: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step, and undo it on the device where ``found_inf`` is 1.

    Returns:
        What ``optimizer.step`` returns, whether the step was undone or not.

    Raises:
        RuntimeError: The step has changed what cannot be put back: a number in a group, in the state or in
            an attribute, or what state there is.
    """
    params = [param for param in params_of(optimizer) if param.grad is not None]
    before = {name: _copy(optimizer, name, value) for name, value in _held(optimizer, params).items()}
    with torch.enable_grad():
        value = optimizer.step(*args, **kwargs)
    after = _held(optimizer, params)
    _refuse_if_changed(optimizer, before, after, found_inf.device)
    undo = found_inf > 0
    for name, tensor in after.items():
        if isinstance(tensor, Tensor) and tensor.device == undo.device:
            torch.where(undo, before[name], tensor, out=tensor)
    return value


def _copy(optimizer: Optimizer, name: str, value: Any) -> Any:
    """Return a copy of a tensor; of anything else itself.

    Raises:
        RuntimeError: It is of a subclass that has no copy, as 8-bit state may be.
    """
    try:
        return value.clone() if isinstance(value, Tensor) else value
    except NotImplementedError as error:
        where, _, what = name.partition(".")
        msg = (
            f"sync_free=True: {what.rpartition('.')[2]!r} in {where} of {type(optimizer).__name__} is a "
            f"{type(value).__name__}, which has no copy to put back; pass sync_free=False to GradScaler."
        )
        raise RuntimeError(msg) from error


def _held(optimizer: Optimizer, params: list[Tensor]) -> dict[str, Any]:
    """All that a step may change, by name: parameters, state, options, attributes."""
    held = {f"params.{number}": _local(param) for number, param in enumerate(params)}
    for number, weight in enumerate(map(stored_weight, params)):
        if weight is not None:
            held[f"what is kept beside a weight.{number}"] = weight.kept
    for number, param in enumerate(params):
        held |= _leaves(f"the state.{number}", optimizer.state.get(param, {}))
    return held | _beside_params(optimizer)


def _beside_params(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps that belongs to no parameter: options, counters."""
    held: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        held |= _leaves(f"param_groups.{number}", {k: v for k, v in group.items() if k != "params"})
    held |= _leaves("state", {name: v for name, v in optimizer.state.items() if isinstance(name, str)})
    hidden = {"param_groups", "state", "defaults"}
    own = {
        name: v
        for name, v in vars(optimizer).items()
        if name not in hidden and not name.startswith(("_optimizer_", "_hook", "_zero_grad", "_patched"))
    }
    return held | _leaves("attributes", own)


def _leaves(name: str, value: Any) -> dict[str, Any]:
    """The tensors and numbers in nested containers, by name; parameters are put back elsewhere."""
    if isinstance(value, torch.nn.Parameter):
        return {}
    if isinstance(value, Tensor):
        return {name: _local(value)}
    if isinstance(value, bool | int | float | str | None):
        return {name: value}
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _leaves(f"{name}.{key}", item).items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in _leaves(f"{name}.{i}", item).items()}
    return {}


def _refuse_if_changed(
    optimizer: Optimizer, before: dict[str, Any], after: dict[str, Any], device: torch.device
) -> None:
    """Raise if a step has changed what is no tensor on ``device``."""
    for name in {**before, **after}:
        if name in before and name in after and _can_be_put_back(before[name], after[name], device):
            continue
        where, _, what = name.partition(".")
        msg = (
            f"sync_free=True: a step of {type(optimizer).__name__} changes {what.rpartition('.')[2]!r} in "
            f"{where}, which cannot be put back on the device; pass sync_free=False to GradScaler."
        )
        raise RuntimeError(msg)


def _can_be_put_back(old: Any, new: Any, device: torch.device) -> bool:
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return old is new or bool(old == new)
    alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return alike and (new.device == device or torch.equal(old, new))


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local
