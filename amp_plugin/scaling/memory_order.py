"""How gradients lie in memory, where a kernel reads them as they lie.

torch's fused optimizers on the CPU walk through memory and not through indices. A gradient in another
order than its parameter (a transposed one, or a contiguous one of a channels_last weight) is then stepped
with at the wrong elements, and one that is expanded is read and written beyond its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def match_memory_order(optimizer: Optimizer) -> None:
    """Copy gradients and states that lie otherwise than their parameter, for a fused step on the CPU.

    Autograd lays gradients out as their parameters are. So this copies only what hooks, ``autograd.grad`` or
    a later ``model.to(memory_format=...)`` have left. On GPUs torch looks by itself.

    Args:
        optimizer: Of its groups those with ``fused=True`` are looked at.

    Raises:
        ValueError: A parameter has gaps between its elements, which such a step would write to.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            params = [param for param in group["params"] if param.is_cpu]
            _match_gradients(params, optimizer)
            _match_states(params, optimizer.state)


def _match_gradients(params: list[Tensor], optimizer: Optimizer) -> None:
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided and not _lie_alike(grad, param):
            _refuse_gaps(param, optimizer)
            param.grad = _laid_out_as(param, grad)


def _match_states(params: list[Tensor], states: Any) -> None:
    """All states of a parameter are made in its order: the first of them tells whether it was converted."""
    example = next(((param, states[param]) for param in params if param in states), None)
    if example is None:
        return
    shape = example[0].shape
    names = [name for name, value in example[1].items() if getattr(value, "shape", None) == shape]
    for param in params if names else []:
        state = states.get(param, {})
        first = state.get(names[0])
        if first is not None and not _lie_alike(first, param):
            for name in names:
                state[name] = _laid_out_as(param, state[name])


def _lie_alike(tensor: Tensor, param: Tensor) -> bool:
    """Whether elements follow each other alike in memory."""
    if tensor.stride() == param.stride():
        return True
    pairs = zip(tensor.stride(), param.stride(), param.shape, strict=True)
    return all(stride == other for stride, other, size in pairs if size != 1)  # of 1 element it is idle


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _refuse_gaps(param: Tensor, optimizer: Optimizer) -> None:
    """Raise if a copy cannot lie as the parameter does, since that has gaps."""
    if not _lie_alike(torch.empty_like(param), param):
        msg = (
            f"{type(optimizer).__name__}: a parameter of shape {tuple(param.shape)} and strides "
            f"{param.stride()} has gaps between its elements, which torch's fused step on the CPU would "
            "write to: make it contiguous (param.data = param.data.contiguous()), or pass fused=False."
        )
        raise ValueError(msg)
