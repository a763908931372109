"""The program that test_distributed.py runs in each process.

It runs all scenarios and writes results as JSON.
"""

import json
import math
import warnings
from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_plugin import GradScaler
from tests.process_groups import leave
from tests.scaling.runs import scaler_of

SIZE = 8
FULL = torch.arange(1.0, SIZE + 1)
BOTH = (False, True)
ORDERS = (2.0, math.inf, 1.0)
CALLS = ("norm optimizer", "norm params", "value params", "ensure")
SCALES = (None, 8.0)


def zeros(mesh=None, *placements):
    """Return a parameter of zeros, distributed over a mesh or not."""
    start = torch.zeros(SIZE)
    return torch.nn.Parameter(start if mesh is None else distribute_tensor(start, mesh, placements))


def sgd_and_scaler(params):
    """Return an optimizer whose gradients are set by hand, and a scaler with a scale of 8."""
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer)
    scaler.scale(torch.ones(()))
    return optimizer, scaler


def value_of(param):
    """Return the sum of all elements of a parameter, however it is distributed."""
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().sum().item()


def outcome(scaler, optimizer, params):
    result = scaler.last_step(optimizer)
    report = result.overflow_report()
    return {
        "skipped": result.skipped,
        "norm": None if result.norm is None else result.norm.item(),
        "scale": scaler.get_scale(),
        "values": [value_of(p) for p in params],
        "elsewhere": report.elsewhere,
        "found": [*report.inf, *report.nan],
    }


def plain(rank, world, fused, has_gradients, scale):
    """Use process groups only. The last rank overflows, and may have no gradients."""
    param = zeros()
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = scaler_of(scale, process_groups=[dist.group.WORLD])
    out, last = [], rank == world - 1
    for poison in (True, False):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        if has_gradients or not last:
            overflows = poison and (last or not has_gradients)
            scaler.scale((param * (math.inf if overflows else 3.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        out.append(outcome(scaler, optimizer, [param]))
    return out


def no_gradients(rank, world, call):
    """The last rank has no gradients of its DTensor. Every call must still reach all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    params = [zeros(mesh, Shard(0)) for _ in range(2)]
    optimizer, scaler = sgd_and_scaler(params)
    if rank != world - 1:
        for param in params:
            param.grad = distribute_tensor(FULL * 8.0, mesh, [Shard(0)], src_data_rank=None)
    target, norm = params if call.endswith("params") else optimizer, None
    if call.startswith("norm"):
        norm = scaler.clip_grad_norm_(target, 1e9).item()
    elif call.startswith("value"):
        scaler.clip_grad_value_(target, 1e9)
    else:
        scaler.core.ensure_unscaled(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return {"norm": norm, "skipped": scaler.last_step(optimizer).skipped}


def ddp(rank, world, scale):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = scaler_of(scale)
    scaler.register(optimizer, names=model)
    out = []
    for poison in (1.0, math.inf, 1.0):
        x = torch.full((2, 4), float(rank + 1)) * (poison if rank == 1 else 1.0)
        optimizer.zero_grad()
        for part in x.split(1):  # accumulates without reducing; the second backward reduces
            scaler.scale(model(part).sum()).backward()
        norm = scaler.clip_and_step(optimizer, 1.0).norm
        scaler.update()
        out.append({**outcome(scaler, optimizer, list(model.parameters())), "clip": norm.item()})
    return out


def ddp_mid_window(rank, world):
    """Call unscale_ between two backward passes. Ours must run after DDP's reduction."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 1, bias=False), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    start = model.module.weight.detach().clone()
    for _ in range(2):
        scaler.scale(model(torch.full((1, 4), float(rank + 1))).sum()).backward()
        scaler.core.ensure_unscaled(optimizer)
    gradient = model.module.weight.grad[0, 0].item()
    scaler.step(optimizer)
    return {"grad": gradient, "moved": (start - model.module.weight)[0, 0].item()}


def dtensors(rank, world, fused, poison):
    """Step sharded, replicated and plain parameters with one optimizer."""
    mesh = init_device_mesh("cpu", (world,))
    placements = [Shard(0), Replicate()]
    used = [zeros(mesh, placement) for placement in placements]
    if not fused:  # torch's fused optimizers take DTensors or plain tensors, not both
        used.append(zeros())
    optimizer, scaler = sgd_and_scaler(used)
    if fused:
        optimizer = torch.optim.Adam(used, lr=1.0, fused=True)
    for param, placement in zip(used, [*placements, None], strict=False):
        param.grad = distribute_tensor(FULL * 8.0, mesh, [placement]) if placement else FULL * 8.0
    if poison is not None and rank == world - 1:
        getattr(used[poison].grad, "_local_tensor", used[poison].grad)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return outcome(scaler, optimizer, used if poison is None else [])


def partial(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    param = zeros(mesh, Replicate())
    optimizer, scaler = sgd_and_scaler([param])
    param.grad = DTensor.from_local(torch.full((SIZE,), 8.0), mesh, [Partial()])
    scaler.step(optimizer)
    return outcome(scaler, optimizer, [param])


def net(*sizes):
    """Return two layers that are the same on each rank."""
    torch.manual_seed(0)
    first, middle, last = sizes
    return torch.nn.Sequential(torch.nn.Linear(first, middle), torch.nn.Tanh(), torch.nn.Linear(middle, last))


def fsdp1_of(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def finite(norm):
    """Replace infinities, because JSON has none."""
    return norm if math.isfinite(norm) else None


def fsdp(rank, world, kind, fused, scale):
    """Train on four batches.

    The third is infinite on one rank. Odd sizes give a rank of FSDP1 empty shards of small parameters.
    """
    model = inner = net(5, 7, 1)
    if kind == "fsdp1":
        model = fsdp1_of(inner)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    groups = [dist.group.WORLD] if kind == "fsdp1" else []
    scaler, norms, skipped = scaler_of(scale, sharded_groups=groups), [], []
    for i in range(4):
        x = torch.full((2, 5), 1.0 + i) * (math.inf if i == 2 and rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if fused:
            norm = scaler.clip_and_step(optimizer, 0.5).norm
        else:
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
        norms.append(finite(norm.item()))
        scaler.update()
        skipped.append(scaler.last_step(optimizer).skipped)
    empty = any(p.grad is None or p.grad.numel() == 0 for p in inner.parameters())
    with FullyShardedDataParallel.summon_full_params(model) if kind == "fsdp1" else nullcontext():
        values = [value_of(p) for p in inner.parameters()]
    return {"empty": empty, "norms": norms, "values": values, "skipped": skipped}


def tensor_parallel_fsdp2(rank, world):
    """Use FSDP2 over tensor parallelism, so that some parameters have two placements and others have one."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model, whole = net(6, 8, 2), net(6, 8, 2)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    x = torch.linspace(-1.0, 1.0, 12).reshape(2, 6)
    out = []
    for poison in (1.0, math.inf):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if poison == math.inf and rank == world - 1:
            next(model.parameters()).grad._local_tensor[0, 0] = math.inf
        norms = [finite(scaler.clip_grad_norm_(optimizer, 1e9, order).item()) for order in ORDERS]
        scaler.step(optimizer)
        scaler.update()
        out.append([norms, scaler.last_step(optimizer).skipped])
    whole(x).square().mean().backward()
    grads = [p.grad.double() for p in whole.parameters()]
    right = [torch.nn.utils.get_total_norm(grads, order).item() for order in ORDERS]
    kinds = sorted({type(p).__name__ for q in model.parameters() for p in q.placements})
    return {"steps": out, "right": right, "kinds": kinds}


def spikes(rank, world, of):
    """Plant a spike on the last rank only: in its loss, or in its shard of the gradients."""
    on = {"sharded_groups": [dist.group.WORLD]} if of == "norm" else {}
    scaler = GradScaler("cpu", enabled=False, on_spike={"of": of, "window": 8, "warmup": 4}, **on)
    param = zeros()
    optimizer = torch.optim.SGD([param], lr=1e-3)
    told = []
    for step in range(8):
        size = 100.0 if step == 6 and rank == world - 1 else 1.0 + 0.1 * (step % 3)
        optimizer.zero_grad()
        scaler.scale(torch.tensor(size if of == "loss" else 1.0))
        param.grad = FULL * (size if of == "norm" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        told.append(scaler.last_step(optimizer).verdict)
    return {"told": told, "state": scaler.state_dict()["amp_plugin"]["spikes"], "value": value_of(param)}


def scenarios(rank, world):
    if world == 4:
        return {"tensor_parallel": tensor_parallel_fsdp2(rank, world)}
    return {
        **{f"plain {f} {g} {s}": plain(rank, world, f, g, s) for f, g, s in product(BOTH, BOTH, SCALES)},
        **{f"ddp {s}": ddp(rank, world, s) for s in SCALES},
        "ddp_mid_window": ddp_mid_window(rank, world),
        **{f"dtensors {p}": dtensors(rank, world, False, p) for p in (None, 0, 1, 2)},
        **{f"fused dtensors {p}": dtensors(rank, world, True, p) for p in (None, 0, 1)},
        "partial": partial(rank, world),
        **{f"spikes {of}": spikes(rank, world, of) for of in ("norm", "loss")},
        **{
            f"{kind} {f} {s}": fsdp(rank, world, kind, f, s)
            for kind, f, s in product(("fsdp1", "fsdp2"), BOTH, SCALES)
        },
        **{f"no gradients {call}": no_gradients(rank, world, call) for call in CALLS},
    }


def report(folder):
    """Run all scenarios as a rank of a gloo group, write the results, and end the process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = scenarios(rank, world)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    leave()
