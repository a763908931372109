"""What else FSDP2 is used with, each beside one process; and a run saved by four ranks that goes on with two."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from amp_plugin import GradScaler, autocast, fully_shard
from amp_plugin.casting.fp32_modules import apply_fp32_modules
from tests.sharding.models import DTYPES, IN_FP32, Net, flat, loss_of, optimizer_of, plan

SHARES, STEPS = 4, 3


def as_it_is(net):
    """No change."""


def frozen(net):
    """A block that is frozen, its layers in 16 bits, as a base under adapters."""
    block = net.blocks[0].requires_grad_(False)
    for param in (*block.up.parameters(), *block.down.parameters()):
        param.data = param.data.bfloat16()


def checkpointed(net):
    """Blocks that compute their activations again in backward."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)


VARIANTS = {
    "reshard never": (as_it_is, {"reshard_after_forward": False}, 1),
    "reshard always": (as_it_is, {"reshard_after_forward": True}, 1),
    "offload": (as_it_is, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1),
    "frozen": (frozen, {}, 1),
    "checkpointed": (checkpointed, {}, 1),
    "accumulated": (as_it_is, {}, 2),
    "accumulated checkpointed": (checkpointed, {"reshard_after_forward": False}, 2),
}


def trained_params(net):
    return [param for param in net.parameters() if param.requires_grad]


def on_ranks(change, options, micro_batches):
    """Each rank has a share of each micro-batch; all but the last are not reduced."""
    net = Net()
    change(net)
    fully_shard(
        net, plan(), units=net.blocks, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options
    )
    optimizer, losses = optimizer_of(trained_params(net)), []
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


def in_one_process(change, micro_batches):
    net = Net()
    apply_fp32_modules(net, IN_FP32)
    change(net)
    optimizer, losses = optimizer_of(trained_params(net)), []
    shares = SHARES * micro_batches
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in range(shares):
            with autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, step, share) / shares
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses).view(STEPS, -1).sum(1), flat(net)


def variants(_, __):
    report = {}
    for name, (change, options, micro_batches) in VARIANTS.items():
        losses, weights = on_ranks(change, options, micro_batches)
        want_losses, want_weights = in_one_process(change, micro_batches)
        report[name] = {
            "losses": ((losses - want_losses).abs() / want_losses).max().item(),
            "weights": ((weights.float() - want_weights.float()).norm() / want_weights.float().norm()).item(),
        }
    return report


# -- saved by four ranks, resumed by two ---------------------------------------------------------

SAVED_AT, END = 3, 8


class SavedRun:
    """A run in fp16 whose loss scale has moved when it is saved; of two ranks each has two shares."""

    def __init__(self):
        self.net = Net()
        fully_shard(self.net, plan("fp16"), units=self.net.blocks)
        self.optimizer = optimizer_of(self.net.parameters())
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def train(self, steps, poison=None):
        ranks, losses = dist.get_world_size(), []
        shares = range(dist.get_rank(), SHARES, ranks)
        for step in steps:
            self.optimizer.zero_grad()
            for count, share in enumerate(shares, 1):
                self.net.set_requires_gradient_sync(count == len(shares))
                factor = torch.inf if step == poison and share == SHARES - 1 else 0.0
                with autocast("cpu", dtype=DTYPES["fp16"]):
                    loss = loss_of(self.net, step, share, factor) / len(shares)
                self.scaler.scale(loss).backward()
                losses.append(loss.detach())
            self.scaler.step(self.optimizer)
            self.scaler.update()
        total = torch.stack(losses) / ranks
        dist.all_reduce(total)
        return total.view(len(steps), -1).sum(1).tolist()

    def state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}


def save(folder, _):
    run = SavedRun()
    run.train(range(SAVED_AT), poison=1)
    dcp.save(run.state(), checkpoint_id=folder / "saved")
    return {"scale": run.scaler.get_scale(), "losses": run.train(range(SAVED_AT, END)), **end_of(run)}


def resume(folder, _):
    run = SavedRun()
    state = run.state()
    dcp.load(state, checkpoint_id=folder / "saved")
    set_state_dict(
        run.net, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    run.scaler.load_state_dict(state["scaler"])
    return {"scale": run.scaler.get_scale(), "losses": run.train(range(SAVED_AT, END)), **end_of(run)}


def end_of(run):
    return {"end": run.scaler.get_scale(), "weights": flat(run.net).tolist()}
