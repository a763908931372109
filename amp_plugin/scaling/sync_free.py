"""Skip a step on the device: step always, then put the old values back if it overflowed.

For optimizers that know nothing of loss scales. Costs a copy of parameters and state and one
select pass; saves the wait for the overflow flag. The first step of a parameter is taken the
ordinary way, since it makes the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def possible(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step can be undone on the device.

    Args:
        optimizer: Its state must exist for every parameter with a gradient, or it keeps none.
        device: Where the overflow flag is.

    Raises:
        RuntimeError: The optimizer keeps state that is no tensor, or on another device.
    """
    stepping = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    with_state = [p for p in stepping if optimizer.state.get(p)]
    for param in with_state:
        _require_selectable(optimizer, optimizer.state[param], device)
    if len(with_state) == len(stepping):
        return True
    return not with_state and _keeps_no_state(optimizer)


def _keeps_no_state(optimizer: Optimizer) -> bool:
    plain_sgd = isinstance(optimizer, torch.optim.SGD)
    return plain_sgd and not any(group["momentum"] for group in optimizer.param_groups)


def _require_selectable(optimizer: Optimizer, state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if value is None or (isinstance(value, Tensor) and value.device == device):
            continue
        where = f"on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        way_out = "capturable=True to the optimizer, or " if "capturable" in optimizer.defaults else ""
        msg = (
            f"sync_free=True: the state {name!r} of {type(optimizer).__name__} is {where}, which cannot be "
            f"put back on {device} without a sync; pass {way_out}sync_free=False."
        )
        raise RuntimeError(msg)


@torch.no_grad()
def step(optimizer: Optimizer, found_inf: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step, and undo it on the device where ``found_inf`` is 1.

    Args:
        optimizer: One for which :func:`possible` is true.
        found_inf: float32, 0-dim.
        args: For ``optimizer.step``.
        kwargs: For ``optimizer.step``.

    Returns:
        What ``optimizer.step`` returns, whether the step was undone or not.

    Raises:
        RuntimeError: The step has changed what cannot be put back: an option of a group, or what state
            there is.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    current = [_local(p) for p in params]
    current += [
        _local(v) for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)
    ]
    before = [t.clone() for t in current]
    options, kinds = _options(optimizer), _kinds_of_state(optimizer, params)
    with torch.enable_grad():
        value = optimizer.step(*args, **kwargs)
    _refuse_if_changed(optimizer, options, _options(optimizer), "param_groups")
    _refuse_if_changed(optimizer, kinds, _kinds_of_state(optimizer, params), "the state")
    undo = found_inf > 0
    for tensor, old in zip(current, before, strict=True):
        torch.where(undo, old, tensor, out=tensor)
    return value


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers in the groups, which a step must leave alone."""
    return {
        f"{number}.{name}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, bool | int | float | str | tuple)
    }


def _kinds_of_state(optimizer: Optimizer, params: list[Tensor]) -> dict[str, Any]:
    return {
        f"{number}.{name}": type(value).__name__
        for number, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
    }


def _refuse_if_changed(
    optimizer: Optimizer, before: dict[str, Any], after: dict[str, Any], where: str
) -> None:
    if before != after:
        name = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        msg = (
            f"sync_free=True: a step of {type(optimizer).__name__} changes {name.split('.', 1)[1]!r} in "
            f"{where}, which cannot be put back on the device; pass sync_free=False to GradScaler."
        )
        raise RuntimeError(msg)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local
