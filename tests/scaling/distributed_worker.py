"""What test_distributed.py runs in each process: every scenario in turn, results as JSON."""

import json
import math
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_plugin import GradScaler
from tests.process_groups import leave

SIZE = 8
FULL = torch.arange(1.0, SIZE + 1)
BOTH = (False, True)
CALLS = ("norm optimizer", "norm params", "value params", "ensure")
GUARDED = ("groups", "ddp", "fsdp1", "fsdp2")


def zeros(mesh=None, *placements):
    """A parameter of zeros, spread over a mesh or not."""
    start = torch.zeros(SIZE)
    return torch.nn.Parameter(start if mesh is None else distribute_tensor(start, mesh, placements))


def sgd_and_scaler(params, **options):
    """An optimizer of gradients that are set by hand, and a scaler whose scale is 8."""
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, **options)
    scaler.register(optimizer)
    scaler.scale(torch.ones(()))
    return optimizer, scaler


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
    param = zeros()
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, process_groups=[dist.group.WORLD])
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
    """The last rank has no gradients of its DTensor; every call must find all ranks."""
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
        scaler.ensure_unscaled(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return {"norm": norm, "skipped": scaler.last_step(optimizer).skipped}


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
    placements = [Shard(0), Replicate()]
    used = [zeros(mesh, placement) for placement in placements]
    if not fused:  # torch's fused optimizers take DTensors or plain ones, not both
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


def mesh_2d(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    out = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        for norm_type, poison in ((2.0, False), (math.inf, False), (1.0, False), (2.0, True)):
            param = zeros(mesh, *placements)
            optimizer, scaler = sgd_and_scaler([param])
            param.grad = distribute_tensor(FULL * 8.0, mesh, placements)
            if poison and rank == world - 1:
                param.grad._local_tensor[0] = math.nan
            norm = scaler.clip_grad_norm_(optimizer, 1e9, norm_type).item()
            scaler.step(optimizer)
            out.append(scaler.last_step(optimizer).skipped if poison else norm)
    return out


def net(*sizes):
    """Two layers, the same on each rank."""
    torch.manual_seed(0)
    first, middle, last = sizes
    return torch.nn.Sequential(torch.nn.Linear(first, middle), torch.nn.Tanh(), torch.nn.Linear(middle, last))


def fsdp1_of(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def finite(norm):
    """For JSON, which has no infinity."""
    return norm if math.isfinite(norm) else None


def fsdp(rank, world, kind, fused):
    """Four batches, one rank's third infinite. With odd sizes a rank of FSDP1 has an empty shard of the small ones."""
    model = inner = net(5, 7, 1)
    if kind == "fsdp1":
        model = fsdp1_of(inner)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    groups = [dist.group.WORLD] if kind == "fsdp1" else []
    scaler, norms = GradScaler("cpu", init_scale=2.0**10, sharded_groups=groups), []
    for i in range(4):
        x = torch.full((2, 5), 1.0 + i) * (math.inf if i == 2 and rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        norms.append(finite(scaler.clip_grad_norm_(optimizer, 0.5, fold=fused).item()))
        scaler.step(optimizer)
        scaler.update()
    empty = any(p.grad is None or p.grad.numel() == 0 for p in inner.parameters())
    with FullyShardedDataParallel.summon_full_params(model) if kind == "fsdp1" else nullcontext():
        values = [value_of(p) for p in inner.parameters()]
    return {"empty": empty, "norms": norms, "values": values, "scale": scaler.get_scale()}


def fsdp1_nothing_here(rank, world):
    """One element over two ranks: the last one's shard is empty, its optimizer has no gradients at all."""
    inner = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(inner.weight, 3.0)
    model, out = fsdp1_of(inner), []
    optimizer, scaler = sgd_and_scaler(list(model.parameters()), sharded_groups=[dist.group.WORLD])
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), 2.0 * factor)).sum()).backward()
        count = sum(p.grad is not None and p.grad.numel() > 0 for p in model.parameters())
        norm = scaler.clip_grad_norm_(list(model.parameters()), 1e9).item()
        scaler.step(optimizer)
        scaler.update()
        out.append([count, finite(norm), scaler.last_step(optimizer).skipped])
    return out


def tensor_parallel_fsdp2(rank, world):
    """FSDP2 over tensor parallelism: placements of a kind of their own, beside ordinary ones."""
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
        norm = scaler.clip_grad_norm_(optimizer, 0.5).item()
        scaler.step(optimizer)
        scaler.update()
        out.append([finite(norm), scaler.last_step(optimizer).skipped])
    whole(x).square().mean().backward()
    right = torch.nn.utils.get_total_norm([p.grad.double() for p in whole.parameters()]).item()
    kinds = sorted({type(p).__name__ for q in model.parameters() for p in q.placements})
    return {"steps": out, "right": right, "kinds": kinds}


def guarded(rank, world, kind, clip):
    """Nothing is scaled: one nan in the gradients that the last rank holds, at the second of three steps."""
    model, groups = net(4, 4, 2), {}
    if kind == "groups":
        groups["process_groups"] = [dist.group.WORLD]
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        model, groups["sharded_groups"] = fsdp1_of(model), [dist.group.WORLD]
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    scaler = GradScaler("cpu", enabled=False, **groups)
    out = []
    for i in range(3):
        before = [getattr(p, "_local_tensor", p).detach().clone() for p in params]
        x = torch.full((2, 4), float(rank + 1)) * (math.nan if kind == "ddp" and (rank, i) == (1, 1) else 1.0)
        optimizer.zero_grad()
        model(x).sum().backward()
        if kind != "ddp" and (rank, i) == (world - 1, 1):
            grads = (p.grad for p in params if p.grad is not None)
            local = (getattr(grad, "_local_tensor", grad) for grad in grads)
            next(grad for grad in local if grad.numel()).view(-1)[0] = math.nan
        if clip and kind in {"groups", "ddp"}:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.assume_unchanged(optimizer)
        scaler.step(optimizer)
        after = [getattr(p, "_local_tensor", p).detach() for p in params]
        result = scaler.last_step(optimizer)
        out.append(
            {
                "skipped": result.skipped,
                "elsewhere": result.overflow_report().elsewhere,
                "moved": any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
                "finite": all(bool(p.isfinite().all()) for p in after),
            }
        )
    return out


def scenarios(rank, world):
    if world == 4:
        return {"mesh_2d": mesh_2d(rank, world), "tensor_parallel": tensor_parallel_fsdp2(rank, world)}
    return {
        **{f"plain {f} {g}": plain(rank, world, f, g) for f in BOTH for g in BOTH},
        "ddp": ddp(rank, world),
        "ddp_mid_window": ddp_mid_window(rank, world),
        **{f"dtensors {p}": dtensors(rank, world, False, p) for p in (None, 0, 1, 2)},
        **{f"fused dtensors {p}": dtensors(rank, world, True, p) for p in (None, 0, 1)},
        "partial": partial(rank, world),
        **{f"{kind} {f}": fsdp(rank, world, kind, f) for kind in ("fsdp1", "fsdp2") for f in BOTH},
        **{f"no gradients {call}": no_gradients(rank, world, call) for call in CALLS},
        "fsdp1_nothing_here": fsdp1_nothing_here(rank, world),
        **{f"guarded {k} {c}": guarded(rank, world, k, c) for k in GUARDED for c in BOTH},
    }


def report(folder):
    """Run all scenarios as a rank of a gloo group and write what came of them; ends the process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = scenarios(rank, world)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    leave()
