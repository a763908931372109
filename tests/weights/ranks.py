"""The program that test_ddp.py runs in each process. It writes FOLDER/rankN.json."""

import copy
import itertools
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_plugin import AmpPrecision, FabricAmpPrecision, GradScaler, autocast, store_weights
from amp_plugin.weights.ddp import reduce_in_fp32
from amp_plugin.weights.shard import local_of
from tests.adapters.accelerate_pair import ours
from tests.adapters.lightning_models import Linear, fit, regression
from tests.process_groups import leave
from tests.weights.twins import give_gradients

STEPS, MICRO_BATCHES, ROWS = 20, 2, 4


class Net(nn.Module):
    """A channels_last convolution, a norm and a linear layer: three memory orders and two dtypes in one
    model.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.norm(self.conv(x).flatten(1)))


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(ROWS, 2, 3, 3, generator=generator)
    return x, x.flatten(1).sum(1, keepdim=True)


def loss_of(model, x, y):
    with autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return nn.functional.mse_loss(out.float(), y)


def exact(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def train(weights, ranks, *, ddp):
    """Yield accumulation windows of two micro-batches.

    Without DDP, each micro-batch has the rows of all ranks.
    """
    rank = dist.get_rank()
    model = Net(seed=rank if ddp else 0)  # DDP copies the first rank's weights to all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store_weights(model, optimizer, weights=weights, fp32_modules=["norm"])
    net = DistributedDataParallel(model) if ddp else model
    reduce_in_fp32(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            rows = [rank] if ddp else range(ranks)
            x, y = (torch.cat(parts) for parts in zip(*(batch(step, micro, r) for r in rows), strict=True))
            if ddp:
                net.require_backward_grad_sync = micro == MICRO_BATCHES - 1
            (loss_of(net, x, y) / MICRO_BATCHES).backward()
        optimizer.step()
    return exact(model)


def compared(one, other):
    """Compare the final weights of two runs with each other and with the initial ones."""
    return {
        "same_on_all_ranks": is_same_on_all_ranks(one),
        "distance": (one - other).abs().mean().item(),
        "moved": (other - exact(Net())).abs().mean().item(),
    }


def compare_with_one_process(weights, ranks):
    return compared(train(weights, ranks, ddp=True), train(weights, ranks, ddp=False))


def reduced_gradients(ranks):
    """Return a window's gradients, and the mean over ranks of gradients that were added locally in float32."""
    model = Net()
    store_weights(model, weights="bf16")
    alone = copy.deepcopy(model)
    net = DistributedDataParallel(model, find_unused_parameters=True)
    reduce_in_fp32(net)
    same = []
    for micro in range(2):
        net.require_backward_grad_sync = micro == 1
        x, y = batch(0, micro, dist.get_rank())
        for way in (net, alone):
            loss_of(way, x, y).backward()
    for param, single in zip(model.parameters(), alone.parameters(), strict=True):
        mean = single.grad.clone().contiguous() / ranks
        dist.all_reduce(mean)
        same.append(torch.equal(param.grad, mean) and param.grad.dtype is torch.float32)
    return same


def refusal_of(net):
    try:
        reduce_in_fp32(net)
    except (ValueError, RuntimeError) as error:
        return str(error)


def refusals():
    model = Net()
    store_weights(model, weights="bf16")
    found = {"bucket_views": refusal_of(DistributedDataParallel(model, gradient_as_bucket_view=True))}
    net = DistributedDataParallel(model)
    net.register_comm_hook(
        None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reduce_in_fp32(net)
    found["own_hook"] = str(caught[0].message)
    model = Net()
    if dist.get_rank() == 1:
        store_weights(model, weights="bf16-true")
    else:
        model.bfloat16()
    found["one_rank"] = refusal_of(DistributedDataParallel(model))
    return found


def is_same_on_all_ranks(value):
    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(others, value)
    return all(torch.equal(other, value) for other in others)


def joined(weights):
    """Train on uneven inputs: rank 1 has two batches less."""
    model = Net(seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    store_weights(model, optimizer, weights=weights)
    net = DistributedDataParallel(model)
    reduce_in_fp32(net)
    with net.join():
        for step in range(4 - 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(net, *batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
    return exact(model)


def with_zero(weights):
    """Train with an optimizer whose state is sharded over the ranks."""
    # importing it gives a warning about torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    store = store_weights(model, optimizer, weights=weights)
    store.add(optimizer.optim) if weights == "bf16" else None
    for number in range(50):
        give_gradients(number, model)
        optimizer.step()
    return exact(model)


def in_trainer(ranks):
    module, data = Linear(), regression(3, ROWS, seed=dist.get_rank())
    options = {"strategy": "ddp", "devices": ranks, "use_distributed_sampler": False}
    fit(module, AmpPrecision("bf16", weights="bf16"), 3, data=data, **options)
    return module.net


def in_fabric(ranks):
    fabric = Fabric(
        strategy="ddp", accelerator="cpu", devices=ranks, plugins=FabricAmpPrecision("bf16", weights="bf16")
    )
    fabric.launch()
    return three_steps(fabric.setup, fabric.backward)


def in_accelerate(_):
    accelerator = ours(precision="bf16", weights="bf16")
    return three_steps(accelerator.prepare, accelerator.backward)


def three_steps(prepare, backward):
    inner = Linear().net
    net, optimizer = prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
    for x, y in regression(3, ROWS, seed=dist.get_rank()):
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
    return inner


def described(model):
    gradient = next(model.parameters()).grad
    return {
        "same": is_same_on_all_ranks(exact(model)),
        "gradients": str(gradient.dtype) if gradient is not None else None,
        "sum": exact(model).double().sum().item(),
    }


def compressed_states(form, *, sharded):
    """Train with compressed moments under DDP or FSDP2, save after five steps, and continue twice."""
    rank, runs, saved = dist.get_rank(), [], ({}, {})
    for resumed in (False, True):
        model = Net().to(memory_format=torch.contiguous_format)
        net = fully_shard(model) if sharded else DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        store_weights(model, optimizer, weights="fp32", state=form)
        scaler = GradScaler("cpu", enabled=False)
        if resumed:
            set_state_dict(net, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        for step in range(5 if resumed else 0, 10):
            if step == 5 and not resumed:
                saved = copy.deepcopy(get_state_dict(net, optimizer))
            optimizer.zero_grad()
            loss_of(net, *batch(step, 0, rank)).backward()
            scaler.step(optimizer)
        weights = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        runs.append(torch.cat([weights[name].flatten() for name in sorted(weights)]) if weights else None)
    same = None if runs[0] is None else bool(torch.equal(*runs))
    moments = (v for entry in optimizer.state.values() for name, v in entry.items() if name != "step")
    forms = sorted({getattr(local_of(value), "form", "fp32") for value in moments})
    return {"forms": forms, "same": same, "one_pass": scaler.last_step(optimizer).one_pass}


def main(folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    states = itertools.product(("bf16", "8bit"), ("ddp", "fsdp2"))
    report = {
        "against_one_process": {
            w: compare_with_one_process(w, ranks) for w in ("fp32", "bf16", "bf16-stochastic")
        },
        "reduced": reduced_gradients(ranks),
        "refusals": refusals(),
        "joined": compared(joined("bf16"), joined("fp32")),
        "zero": compared(with_zero("bf16"), with_zero("fp32")),
        "states": {f"{form} {way}": compressed_states(form, sharded=way == "fsdp2") for form, way in states},
        "frameworks": [described(run(ranks)) for run in (in_trainer, in_fabric, in_accelerate)],
    }
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()
