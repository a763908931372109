"""Run by test_distributed.py in each process: every scenario in turn, results as JSON."""

import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from amp_plugin import GradScaler

SIZE = 8


def value_of(param):
    """The sum of all elements of a parameter, whatever it is spread over."""
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


def plain(rank, world, fused, has_gradients):
    """Nothing but process groups: the last rank overflows, and may have no gradients."""
    param = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, process_groups=[dist.group.WORLD])
    out = []
    for poison in (True, False):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        last = rank == world - 1
        if has_gradients or not last:
            scaler.scale(
                (param * (math.inf if poison and (last or not has_gradients) else 3.0)).sum()
            ).backward()
        scaler.step(optimizer)
        scaler.update()
        out.append(outcome(scaler, optimizer, [param]))
    return out


def ddp(rank, world):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.register(optimizer, names=model)
    out = []
    for poison in (1.0, math.inf, 1.0):
        x = torch.full((2, 4), float(rank + 1)) * (poison if rank == 1 else 1.0)
        optimizer.zero_grad()
        for part in x.split(1):  # accumulates; the second backward is the one that reduces
            scaler.scale(model(part).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0, fold=True)
        scaler.step(optimizer)
        scaler.update()
        out.append({**outcome(scaler, optimizer, list(model.parameters())), "clip": norm.item()})
    return out


def ddp_mid_window(rank, world):
    """unscale_ between two backwards: ours runs after DDP's reduction."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 1, bias=False), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    start = model.module.weight.detach().clone()
    for _ in range(2):
        scaler.scale(model(torch.full((1, 4), float(rank + 1))).sum()).backward()
        scaler.ensure_unscaled(optimizer)
    gradient = model.module.weight.grad[0, 0].item()
    scaler.step(optimizer)
    return {"grad": gradient, "moved": (start - model.module.weight)[0, 0].item()}


def dtensors(rank, world, fused, poison):
    """Sharded, replicated and plain parameters of one optimizer."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1.0, SIZE + 1)
    placements = [Shard(0), Replicate()]
    params = [torch.nn.Parameter(distribute_tensor(torch.zeros(SIZE), mesh, [p])) for p in placements]
    params.append(torch.nn.Parameter(torch.zeros(SIZE)))
    used = params[:2] if fused else params  # torch's fused optimizers take DTensors or plain ones, not both
    optimizer = torch.optim.Adam(used, lr=1.0, fused=True) if fused else torch.optim.SGD(used, lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for param, placement in zip(params[:2], placements, strict=True):
        param.grad = distribute_tensor(full * 8.0, mesh, [placement])
    if not fused:
        params[2].grad = full * 8.0
    if poison is not None and rank == world - 1:
        target = params[poison].grad
        (target._local_tensor if isinstance(target, DTensor) else target)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return outcome(scaler, optimizer, used if poison is None else [])


def partial(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(SIZE), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = DTensor.from_local(torch.full((SIZE,), 8.0), mesh, [Partial()])
    scaler.step(optimizer)
    return outcome(scaler, optimizer, [param])


def mesh_2d(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(1.0, SIZE + 1)
    out = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        for norm_type, poison in ((2.0, False), (math.inf, False), (1.0, False), (2.0, True)):
            param = torch.nn.Parameter(distribute_tensor(torch.zeros(SIZE), mesh, placements))
            optimizer = torch.optim.SGD([param], lr=1.0)
            scaler = GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            param.grad = distribute_tensor(full * 8.0, mesh, placements)
            if poison and rank == world - 1:
                param.grad._local_tensor[0] = math.nan
            norm = scaler.clip_grad_norm_(optimizer, 1e9, norm_type).item()
            scaler.step(optimizer)
            out.append(scaler.last_step(optimizer).skipped if poison else norm)
    return out


def fsdp2(rank, world, fused):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    norms = []
    for i in range(4):
        x = torch.full((2, 5), 1.0 + i) * (math.inf if i == 2 and rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 0.5, fold=fused).item())
        scaler.step(optimizer)
        scaler.update()
    return {
        "norms": [n if math.isfinite(n) else None for n in norms],
        "values": [value_of(p) for p in model.parameters()],
        "scale": scaler.get_scale(),
    }


def fsdp1(rank, world, fused):
    """Odd sizes: one rank has an empty shard of the small parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, sharded_groups=[dist.group.WORLD])
    norms = []
    for i in range(4):
        x = torch.full((2, 5), 1.0 + i) * (math.inf if i == 2 and rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 0.5, fold=fused).item())
        scaler.step(optimizer)
        scaler.update()
    with FullyShardedDataParallel.summon_full_params(model):
        values = [value_of(p) for p in inner.parameters()]
    return {
        "norms": [n if math.isfinite(n) else None for n in norms],
        "values": values,
        "scale": scaler.get_scale(),
    }


def core_disagrees(rank, world):
    """One rank lost its compiler: both say so instead of drifting apart."""
    import amp_plugin.scaling.distributed as module
    from amp_plugin.kernels.build import NativeCore

    kept = module.native_core
    module.native_core = lambda: NativeCore(
        loaded=rank == 0, reason="", library=None, region=None, seconds=0.0
    )
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", process_groups=[dist.group.WORLD])
    scaler.scale(param.sum()).backward()
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    finally:
        module.native_core = kept
    return "no error"


def scenarios(rank, world):
    if world == 4:
        return {"mesh_2d": mesh_2d(rank, world)}
    both = (False, True)
    return {
        **{f"plain {f} {g}": plain(rank, world, f, g) for f in both for g in both},
        "ddp": ddp(rank, world),
        "ddp_mid_window": ddp_mid_window(rank, world),
        **{f"dtensors {p}": dtensors(rank, world, False, p) for p in (None, 0, 1, 2)},
        **{f"fused dtensors {p}": dtensors(rank, world, True, p) for p in (None, 0, 1)},
        "partial": partial(rank, world),
        **{f"fsdp2 {f}": fsdp2(rank, world, f) for f in both},
        **{f"fsdp1 {f}": fsdp1(rank, world, f) for f in both},
        "core_disagrees": core_disagrees(rank, world),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world, port, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    results = scenarios(rank, world)
    (Path(target) / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
