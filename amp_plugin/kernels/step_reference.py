"""Whole optimizer steps in plain torch: the oracle of the tests and the fallback everywhere.

Written to be read: one tensor at a time, in float64 (float32 on devices without it), rounded
once when written. Each takes the tensors of one parameter group, lists with an entry for each
parameter:

- ``params``: float32, or bfloat16 with ``remainders`` (below).
- ``grads``: float32, bfloat16 or float16; written if ``grad_scale`` is not 1.
- the optimizer's states: float32, of the parameter's shape; ``steps`` float32 or float64, one element.
- ``remainders``: empty, or int16: the low halves of pairs, whose high halves are ``params``; see
  :mod:`amp_plugin.kernels.weight_reference`.

``grad_scale`` (one element) is what gradients are divided by: a loss scale, clipping. They are left
divided, each rounded once to its dtype; the step itself takes the quotients in float32. ``maximize``
and weight decay are not in what is written. Where ``found_inf`` (one element) is above 0 nothing else
is written, step counters included. Without a ``grad_scale``, or where it is 1 in float32, gradients are
not written; their versions then do not move, except that a GPU's host cannot know of the 1.
``lr_tensor`` (one element) takes the place of ``lr``.

Bytes for B of float32 gradients: Adam reads 4 B and writes 4 B, SGD with momentum reads 3 B and
writes 3 B, each B less with a ``grad_scale`` of 1. One launch, no host sync.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_plugin.kernels.weight_reference import pack_weights_, unpack_weights_


@torch.no_grad()
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    remainders: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    maximize: bool,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of :class:`torch.optim.Adam` or, with decoupled weight decay, AdamW.

    ``exp_avgs``, ``exp_avg_sqs``, ``max_exp_avg_sqs`` (empty without amsgrad) and ``steps`` are written. As
    torch writes it (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)::

        grad = +-grad / grad_scale
        grad += weight_decay * param             or, decoupled: param *= 1 - lr * weight_decay
        exp_avg += (1 - beta1) * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad^2
        root = sqrt(exp_avg_sq)                  amsgrad: of the largest exp_avg_sq so far
        param -= lr / (1 - beta1^step) * exp_avg / (root / sqrt(1 - beta2^step) + eps)
    """
    taken = _taken(found_inf)
    rate = lr if lr_tensor is None else _wide(lr_tensor).reshape(())
    pairs = _unscaled(params, grads, remainders, grad_scale, maximize=maximize)
    for i, (param, unscaled) in enumerate(pairs):
        step = _wide(steps[i]) + 1
        grad = unscaled if decoupled_weight_decay else unscaled + weight_decay * param
        kept = param * (1 - rate * weight_decay) if decoupled_weight_decay else param
        first = _wide(exp_avgs[i]) + (1 - beta1) * (grad - _wide(exp_avgs[i]))
        second = beta2 * _wide(exp_avg_sqs[i]) + (1 - beta2) * grad * grad
        largest = second
        if max_exp_avg_sqs:
            largest = torch.maximum(_wide(max_exp_avg_sqs[i]), second)
            _write(max_exp_avg_sqs[i], largest, taken)
        denominator = largest.sqrt() / (1 - beta2**step).sqrt() + eps
        stepped = kept - rate / (1 - beta1**step) * first / denominator
        for tensor, value in ((exp_avgs[i], first), (exp_avg_sqs[i], second), (steps[i], step)):
            _write(tensor, value, taken)
        _write_param(i, stepped, params, remainders, taken)


@torch.no_grad()
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    remainders: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first_step: bool,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of :class:`torch.optim.SGD`.

    ``momentum_buffers``, empty where ``momentum`` is 0, are written; they hold nothing yet at ``first_step``.
    As torch writes it::

        grad = +-grad / grad_scale + weight_decay * param
        buffer = momentum * buffer + (1 - dampening) * grad          (grad at the first step)
        param -= lr * (grad + momentum * buffer if nesterov else buffer)
    """
    taken = _taken(found_inf)
    rate = lr if lr_tensor is None else _wide(lr_tensor).reshape(())
    pairs = _unscaled(params, grads, remainders, grad_scale, maximize=maximize)
    for i, (param, unscaled) in enumerate(pairs):
        grad = direction = unscaled + weight_decay * param
        if momentum:
            buffer = momentum_buffers[i]
            moved = grad if first_step else momentum * _wide(buffer) + (1 - dampening) * grad
            _write(buffer, moved, taken)
            direction = grad + momentum * moved if nesterov else moved
        _write_param(i, param - rate * direction, params, remainders, taken)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _taken(found_inf: Tensor | None) -> Tensor | bool:
    return True if found_inf is None else found_inf.reshape(()) <= 0


def _unscaled(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    remainders: Sequence[Tensor],
    grad_scale: Tensor | None,
    *,
    maximize: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the gradients; yield each parameter and what its step takes, wide."""
    divides = grad_scale is not None and not (grad_scale.is_cpu and grad_scale.float().item() == 1)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        whole = param
        if remainders:
            whole = torch.empty_like(param, dtype=torch.float32)
            unpack_weights_([param], [remainders[i]], [whole])
        unscaled = _wide(grad)
        if grad_scale is not None and divides:
            unscaled = unscaled / _wide(grad_scale).reshape(())
            grad.copy_(unscaled)
        yield _wide(whole), -unscaled if maximize else unscaled


def _write(tensor: Tensor, value: Tensor, taken: Tensor | bool) -> None:
    tensor.copy_(torch.where(torch.as_tensor(taken, device=tensor.device), value.to(tensor.dtype), tensor))


def _write_param(
    i: int,
    value: Tensor,
    params: Sequence[Tensor],
    remainders: Sequence[Tensor],
    taken: Tensor | bool,
) -> None:
    if remainders:
        high, low = torch.empty_like(params[i]), torch.empty_like(remainders[i])
        pack_weights_([value.to(torch.float32)], [high], [low])
        _write(params[i], high, taken)
        _write(remainders[i], low, taken)
        return
    _write(params[i], value, taken)
