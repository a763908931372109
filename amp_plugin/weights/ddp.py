"""Gradients of weights in 16 bits under DistributedDataParallel: added up and reduced in float32.

torch's DDP expects gradients of the parameters' dtype and reduces in it. Here a communication hook reads
the float32 gradients themselves, the sum of a whole accumulation window, reduces them in float32 and hands
the result back, which DDP then writes into ``.grad``. Its buckets, their order and their overlap with
backward stay DDP's; the buckets' own memory, 2 bytes an element, is not looked at.
"""

# No annotations from the future: DDP compares those of a hook with its classes.
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.weight_store import WeightStore, store_of

_DONE = "_amp_plugin_reduces_in_fp32"


def reduce_in_fp32(model: nn.Module) -> None:
    """Let each DistributedDataParallel in a model reduce the gradients of stored weights in float32.

    Also gives all ranks the rests of the first one, as DDP does with parameters.

    Args:
        model: With its wrapper; nothing happens without DDP, without stored weights, or the second time.

    Raises:
        ValueError: DDP was asked to keep gradients in its buckets, which are in 16 bits.
    """
    for ddp in model.modules():
        if not isinstance(ddp, DistributedDataParallel) or vars(ddp).get(_DONE, False):
            continue
        store = store_of(ddp)
        if store is not None and len(store):
            _refuse_bucket_views(ddp)
            setattr(ddp, _DONE, True)
            _share_rests(store, ddp.process_group)
            ddp.reducer._set_mixed_precision_param_dtype(torch.float32)  # type: ignore[attr-defined]
            _register(ddp)


def _refuse_bucket_views(ddp: DistributedDataParallel) -> None:
    if ddp.gradient_as_bucket_view:
        msg = (
            "DistributedDataParallel(gradient_as_bucket_view=True) keeps gradients in the 16 bits of the "
            "weights, which need gradients in float32: leave gradient_as_bucket_view out"
        )
        raise ValueError(msg)


def _register(ddp: DistributedDataParallel) -> None:
    if ddp._comm_hooks:
        warn_user(
            "this DistributedDataParallel has a communication hook, which reduces gradients in the 16 bits "
            "of the weights; without it they are reduced in float32"
        )
        return
    ddp.register_comm_hook(ddp.process_group, _all_reduce_in_fp32)


def _all_reduce_in_fp32(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Average the float32 gradients of a bucket's parameters over a group, in DDP's layout."""
    params = bucket.parameters()
    flat = torch.zeros(sum(param.numel() for param in params), dtype=torch.float32, device=params[0].device)
    start = 0
    for param in params:
        if param.grad is not None:
            _view_like(flat[start : start + param.numel()], param).copy_(param.grad)
        start += param.numel()
    flat.mul_(1.0 / group.size())
    future: Future[list[Tensor]] = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return future.then(lambda reduced: reduced.value()[0])


def _view_like(flat: Tensor, param: Tensor) -> Tensor:
    """A part of a flat tensor in a parameter's shape, and in its memory order where that is dense."""
    dense = torch.empty_like(param, device="meta").stride() == param.stride()
    return (
        flat.as_strided(param.size(), param.stride(), flat.storage_offset())
        if dense
        else flat.view(param.shape)
    )


@torch.no_grad()
def _share_rests(store: WeightStore, group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    for weight in store:
        weight.settle()
        if weight.rest.numel():
            shared = weight.rest.contiguous()
            dist.broadcast(shared.reshape(-1).view(torch.uint8), source, group)
            weight.rest.copy_(shared)
        weight.note_written()
