"""What each of several processes does in test_ddp.py; writes FOLDER/rankN.json."""

import copy
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from amp_plugin import AmpPrecision, FabricAmpPrecision, GradScaler, autocast, store_weights
from amp_plugin.weights.compressed_state import local_of
from amp_plugin.weights.ddp import reduce_in_fp32
from tests.adapters.accelerate_pair import ours
from tests.process_groups import leave
from tests.weights.twins import give_gradients

STEPS, MICRO_BATCHES, ROWS = 20, 2, 4


class Net(nn.Module):
    """A convolution in channels_last, a norm, a layer: 3 memory orders and two dtypes in one model."""

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
    """Windows of two micro-batches; without DDP each has the rows of all ranks."""
    rank = dist.get_rank()
    model = Net(seed=rank if ddp else 0)  # DDP gives all the first rank's
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


def compare_with_one_process(weights, ranks):
    together = train(weights, ranks, ddp=True)
    alone = train(weights, ranks, ddp=False)
    return {
        "same_on_all_ranks": is_same_on_all_ranks(together),
        "distance": (together - alone).abs().mean().item(),
        "moved": (alone - exact(Net())).abs().mean().item(),
    }


def reduced_gradients(ranks):
    """Gradients of a window, and the mean over ranks of what each has added up by itself in float32."""
    model = Net()
    store_weights(model, weights="bf16")
    net = DistributedDataParallel(model, find_unused_parameters=True)
    reduce_in_fp32(net)
    alone = copy.deepcopy(model)
    rank, same = dist.get_rank(), []
    for parts in (model, alone):
        for param in parts.parameters():
            param.grad = None
    for micro in range(2):
        net.require_backward_grad_sync = micro == 1
        x, y = batch(0, micro, rank)
        for way in (net, alone):
            loss_of(way, x, y).backward()
    for param, single in zip(model.parameters(), alone.parameters(), strict=True):
        mean = single.grad.clone().contiguous() / ranks
        dist.all_reduce(mean)
        same.append(torch.equal(param.grad, mean) and param.grad.dtype is torch.float32)
    return same


def refusals():
    model = Net()
    store_weights(model, weights="bf16")
    found = {}
    try:
        reduce_in_fp32(DistributedDataParallel(model, gradient_as_bucket_view=True))
    except ValueError as error:
        found["bucket_views"] = str(error)
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
    try:
        reduce_in_fp32(DistributedDataParallel(model))
    except RuntimeError as error:
        found["one_rank"] = str(error)
    return found


def is_same_on_all_ranks(value):
    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(others, value)
    return all(torch.equal(other, value) for other in others)


def joined():
    """Train on uneven inputs, stored and in float32: rank 1 has two batches fewer."""
    ends = []
    for weights in ("bf16", "fp32"):
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
        ends.append(exact(model))
    return {
        "same": is_same_on_all_ranks(ends[0]),
        "distance": (ends[0] - ends[1]).abs().max().item(),
        "moved": (ends[1] - exact(Net())).abs().max().item(),
    }


def with_zero():
    """Train with an optimizer that is sharded over the ranks, stored and in float32, on the same gradients."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when it is imported

    ends = []
    for weights in ("bf16", "fp32"):
        model = Net()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        store = store_weights(model, optimizer, weights=weights)
        store.add(optimizer.optim) if weights == "bf16" else None
        for number in range(50):
            give_gradients(number, model)
            optimizer.step()
        ends.append(exact(model))
    return {"same": is_same_on_all_ranks(ends[0]), "equal": torch.equal(*ends)}


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, data, _):
        return nn.functional.mse_loss(self.net(data[0]).float(), data[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        parts = [
            torch.cat(part)
            for part in zip(*(batch(s, 0, self.trainer.global_rank) for s in range(3)), strict=True)
        ]
        return DataLoader(TensorDataset(*parts), batch_size=ROWS)


def in_trainer(ranks):
    module = Module()
    Trainer(
        strategy="ddp", accelerator="cpu", devices=ranks, max_steps=3, plugins=[AmpPrecision("bf16", weights="bf16")],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module)  # fmt: skip
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
    inner = Net()
    net, optimizer = prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-3))
    for step in range(3):
        x, y = batch(step, 0, dist.get_rank())
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(net(x).float(), y))
        optimizer.step()
    return inner


def described(model):
    first = next(model.parameters())
    return {
        "halves": first.dtype is torch.bfloat16,
        "same": is_same_on_all_ranks(exact(model)),
        "gradients": str(first.grad.dtype) if first.grad is not None else None,
        "sum": exact(model).double().sum().item(),
    }


def forms_of(optimizer):
    """How the moments of this rank are kept."""
    values = (v for entry in optimizer.state.values() for name, v in entry.items() if name != "step")
    return sorted({getattr(local_of(value), "form", "fp32") for value in values})


def compressed_states(form, *, sharded):
    """AdamW with moments of a format under DDP or FSDP2, saved after five steps and gone on with twice."""
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
    return {"forms": forms_of(optimizer), "same": same, "one_pass": scaler.last_step(optimizer).one_pass}


def main(folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    compared = {w: compare_with_one_process(w, ranks) for w in ("fp32", "bf16", "bf16-stochastic")}
    states = {
        f"{form} {engine}": compressed_states(form, sharded=engine == "fsdp2")
        for form in ("bf16", "8bit")
        for engine in ("ddp", "fsdp2")
    }
    report = {
        "against_one_process": compared,
        "reduced": reduced_gradients(ranks),
        "refusals": refusals(),
        "joined": joined(),
        "zero": with_zero(),
        "states": states,
        "frameworks": [described(run(ranks)) for run in (in_trainer, in_fabric, in_accelerate)],
    }
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()
