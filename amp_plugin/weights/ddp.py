"""Makes DDP reduce the gradients of stored weights in float32, and rejects FSDP1 and DeepSpeed.

By default, DDP expects gradients in the dtype of the parameters, and reduces them in that dtype. The
gradients of stored weights are float32. A communication hook therefore reduces the float32 ``.grad`` tensors.
When the hook runs, ``.grad`` is the sum over all micro-batches of the step. DDP then writes the result to
``.grad``. DDP still chooses the buckets, their order and their overlap with backward. DDP still allocates
memory for its 16-bit buckets, but this memory stays unused.
"""

# This file must not use "from __future__ import annotations".
# DDP requires that the annotations of a communication hook are torch's classes, not their names.
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from amp_plugin.messages import warn_user
from amp_plugin.weights.weight import fp32_shown, is_sharded, stored_params, stored_weight

_DONE = "_amp_plugin_reduces_in_fp32"


def reduce_in_fp32(model: nn.Module) -> None:
    """Make each DistributedDataParallel in a model reduce the gradients of stored weights in float32.

    The function also copies the exact float32 weights of rank 0 to all ranks, as DDP does with ordinary
    parameters. Every rank must call this function, because it runs collectives. Nothing changes if there is
    no DDP, if there is no stored weight, or if the function was called before.

    Args:
        model: The model with its DDP wrapper.

    Raises:
        ValueError: DDP was created with ``gradient_as_bucket_view=True``, so gradients would be in 16 bits.
        RuntimeError: The ranks store their weights in different formats. All ranks raise this error.
    """
    for ddp in model.modules():
        if not isinstance(ddp, DistributedDataParallel) or vars(ddp).get(_DONE, False):
            continue
        setattr(ddp, _DONE, True)
        _refuse_different_ranks(ddp)
        stored = stored_params(ddp.parameters())
        if stored and ddp.gradient_as_bucket_view:
            msg = (
                "DistributedDataParallel(gradient_as_bucket_view=True) keeps gradients in the 16 bits of the "
                "weights, which need gradients in float32: leave gradient_as_bucket_view out"
            )
            raise ValueError(msg)
        if stored:
            with torch.no_grad(), fp32_shown(stored):
                masters = [param.data for param in stored]
                dist._broadcast_coalesced(ddp.process_group, masters, 250 * 2**20, 0)  # type: ignore[attr-defined]
            ddp.reducer._set_mixed_precision_param_dtype(torch.float32)  # type: ignore[attr-defined]
            if ddp._comm_hooks:
                warn_user(
                    "this DistributedDataParallel has a communication hook, which reduces gradients in the "
                    "16 bits of the weights; without it they are reduced in float32"
                )
            else:
                ddp.register_comm_hook(ddp.process_group, _all_reduce_in_fp32)
            ddp.register_forward_pre_hook(_refuse_shown)
            ddp.join_hook = partial(_join_hook, ddp)  # type: ignore[method-assign]


def _refuse_different_ranks(ddp: DistributedDataParallel) -> None:
    ways = [(str(param.dtype), getattr(stored_weight(param), "name", None)) for param in ddp.parameters()]
    of_ranks: list[Any] = [None] * dist.get_world_size(ddp.process_group)
    dist.all_gather_object(of_ranks, ways, group=ddp.process_group)
    for rank, others in enumerate(of_ranks):
        for number, (first, other) in enumerate(zip(of_ranks[0], others, strict=False)):
            if first != other:
                msg = (
                    f"parameter {number} is stored as {first} on rank 0 and as {other} on rank {rank}: "
                    "convert or store the model alike on all ranks, before DistributedDataParallel"
                )
                raise RuntimeError(msg)


def _refuse_shown(ddp: nn.Module, _args: object) -> None:
    """Raise an error if stored weights are temporarily float32. DDP would not reduce their gradients."""
    weights = filter(None, map(stored_weight, ddp.parameters()))
    if torch.is_grad_enabled() and any(weight.shows for weight in weights):
        msg = (
            "a forward pass under DistributedDataParallel inside in_fp32, or after an optimizer step "
            "that has raised an exception: its gradients would not be reduced. Train outside the block, "
            "or run the step again first"
        )
        raise RuntimeError(msg)


def _all_reduce_in_fp32(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Average a bucket's float32 gradients over a process group, in the layout that DDP expects.

    A rank that has run out of batches (see ``DDP.join``) contributes zeros to the average.
    """
    params = bucket.parameters()
    sizes = [param.numel() for param in params]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=params[0].device)
    has_joined = torch._C._current_graph_task_id() == -1  # DDP.join calls the hook outside of backward
    for param, part in zip(params, torch.split(flat, sizes), strict=True):
        if param.grad is not None and not has_joined:
            dense = torch.empty_like(param, device="meta").stride() == param.stride()
            strides = param.stride() if dense else torch.empty(param.shape, device="meta").stride()
            part.as_strided(param.size(), strides).copy_(param.grad)
    flat.mul_(1.0 / group.size())
    future: Future[list[Tensor]] = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def _join_hook(ddp: DistributedDataParallel, **kwargs: Any) -> Any:
    """Return DDP's join hook, modified so that the last rank broadcasts its exact float32 weights."""
    hook: Any = DistributedDataParallel.join_hook(ddp, **kwargs)  # type: ignore[no-untyped-call]
    hook.post_hook = fp32_shown(list(ddp.parameters()))(hook.post_hook)
    return hook


def refuse_sharded(weights: str, setting: str | None) -> None:
    """Raise TypeError if weights are to be stored in 16 bits, but FSDP1 or DeepSpeed shards the model.

    ``setting`` is the setting by which FSDP1 or DeepSpeed casts weights. It is None if neither is used.
    """
    if weights != "fp32" and setting is not None:
        msg = (
            f"weights={weights!r} does not work with FSDP1 or DeepSpeed, which keep float32 shards in flat "
            f"tensors of their own. Shard by FSDP2: {_FSDP2}; or leave weights='fp32' and use {setting}"
        )
        raise TypeError(msg)


_FSDP2 = "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
_CASTS_BY = {
    "FullyShardedDataParallel": "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
    "DeepSpeedEngine": 'DeepSpeed\'s config {"bf16": {"enabled": true}}',
}


def sharded_by(model: nn.Module) -> str | None:
    """Return the setting by which FSDP1 or DeepSpeed casts a model's weights, or None if neither is used."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return next((setting for kind, setting in _CASTS_BY.items() if kind in kinds), None)


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether FSDP1, FSDP2, DeepSpeed or tensor parallelism shards a model."""
    return sharded_by(model) is not None or any(map(is_sharded, model.parameters()))
