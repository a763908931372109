"""Other uses of FSDP2, each compared with one process."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from amp_plugin import autocast, fully_shard
from tests.sharding.models import Net, alone, flat, loss_of, optimizer_of, plan

SHARES, STEPS = 4, 3


def frozen(net):
    """Freeze a block whose layers are in 16 bits, like the base model of an adapter."""
    block = net.blocks[0].requires_grad_(False)
    for param in (*block.up.parameters(), *block.down.parameters()):
        param.data = param.data.bfloat16()


def checkpointed(net):
    """Use blocks that recompute their activations in backward."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)


VARIANTS = {
    "reshard never": (None, {"reshard_after_forward": False}, 1),
    "reshard always": (None, {"reshard_after_forward": True}, 1),
    "offload": (None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1),
    "frozen": (frozen, {}, 1),
    "checkpointed": (checkpointed, {}, 1),
    "accumulated": (None, {}, 2),
    "accumulated checkpointed": (checkpointed, {"reshard_after_forward": False}, 2),
}

# Of the others, each is part of "accumulated checkpointed".
FEW_VARIANTS = ("reshard always", "offload", "frozen", "accumulated checkpointed")


def variants_of(whole):
    """Return the names of all variants, or of a few."""
    return [*VARIANTS] if whole else FEW_VARIANTS


def on_ranks(change, options, micro_batches):
    """Give each rank a part of each micro-batch. Only the last micro-batch reduces gradients."""
    net = Net()
    if change is not None:
        change(net)
    fully_shard(
        net, plan(), units=net.blocks, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options
    )
    optimizer, losses = optimizer_of([param for param in net.parameters() if param.requires_grad]), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            net.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            with autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, step, dist.get_rank() + SHARES * micro_batch) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    total = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(total)
    return total.view(STEPS, -1).sum(1), flat(net)


def variants(_, whole):
    report = {}
    for name in variants_of(whole):
        change, options, micro_batches = VARIANTS[name]
        losses, weights = on_ranks(change, options, micro_batches)
        want_losses, want_weights = alone(SHARES * micro_batches, steps=STEPS, change=change)
        report[name] = {
            "losses": ((losses - want_losses).abs() / want_losses).max().item(),
            "weights": ((weights.float() - want_weights.float()).norm() / want_weights.float().norm()).item(),
        }
    return report
