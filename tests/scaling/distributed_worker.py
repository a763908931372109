"""What test_distributed.py runs in each process: every scenario in turn, results as JSON."""

import json
import math
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from amp_plugin import GradScaler
from tests.process_groups import leave

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


def no_gradients(rank, world, call):
    """The last rank has no gradients of its DTensor; every call must find all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1.0, SIZE + 1)
    params = [torch.nn.Parameter(distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer)
    scaler.scale(torch.ones(()))
    if rank != world - 1:
        for param in params:
            param.grad = distribute_tensor(full * 8.0, mesh, [Shard(0)], src_data_rank=None)
    target = params if call.endswith("params") else optimizer
    if call.startswith("norm"):
        norm = scaler.clip_grad_norm_(target, 1e9).item()
    elif call.startswith("value"):
        norm = scaler.clip_grad_value_(target, 1e9)
    else:
        norm = scaler.ensure_unscaled(optimizer)
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


def four_steps(model, optimizer, scaler, rank, *, fold):
    """Train on batches of which one rank's third is infinite; return the norms, None for infinity."""
    norms = []
    for i in range(4):
        x = torch.full((2, 5), 1.0 + i) * (math.inf if i == 2 and rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 0.5, fold=fold).item())
        scaler.step(optimizer)
        scaler.update()
    return [norm if math.isfinite(norm) else None for norm in norms]


def fsdp2(rank, world, fused):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    norms = four_steps(model, optimizer, scaler, rank, fold=fused)
    return {
        "norms": norms,
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
    norms = four_steps(model, optimizer, scaler, rank, fold=fused)
    empty = [p.grad is None or p.grad.numel() == 0 for p in inner.parameters()]
    with FullyShardedDataParallel.summon_full_params(model):
        values = [value_of(p) for p in inner.parameters()]
    return {
        "empty": empty,
        "norms": norms,
        "values": values,
        "scale": scaler.get_scale(),
    }


def fsdp1_nothing_here(rank, world):
    """One element over two ranks: the last one's shard is empty, its optimizer has no gradients at all."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    inner = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(inner.weight, 3.0)
    model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10, sharded_groups=[dist.group.WORLD])
    scaler.register(optimizer)
    out = []
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), 2.0 * factor)).sum()).backward()
        count = sum(p.grad is not None and p.grad.numel() > 0 for p in model.parameters())
        norm = scaler.clip_grad_norm_(list(model.parameters()), 1e9).item()
        scaler.step(optimizer)
        scaler.update()
        out.append([count, norm if math.isfinite(norm) else None, scaler.last_step(optimizer).skipped])
    return out


def tensor_parallel_fsdp2(rank, world):
    """FSDP2 over tensor parallelism: placements of a kind of their own, beside ordinary ones."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model, whole = build(), build()
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
        out.append([norm if math.isfinite(norm) else None, scaler.last_step(optimizer).skipped])
    whole(x).square().mean().backward()
    right = torch.nn.utils.get_total_norm([p.grad.double() for p in whole.parameters()]).item()
    kinds = sorted({type(p).__name__ for q in model.parameters() for p in q.placements})
    return {"steps": out, "right": right, "kinds": kinds}


def core_disagrees(rank, world):
    """One rank lost its compiler: both say so instead of drifting apart."""
    import amp_plugin.scaling.ranks as module
    from amp_plugin.kernels.build import NativeCore

    kept = module.native_core
    module.native_core = lambda: NativeCore(region=module if rank == 0 else None)
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


def guarded(rank, world, kind, clip):
    """Nothing is scaled: one nan in the gradients that the last rank holds, at the second of three steps."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    groups = {
        "groups": {"process_groups": [dist.group.WORLD]},
        "fsdp1": {"sharded_groups": [dist.group.WORLD]},
    }
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    scaler = GradScaler("cpu", enabled=False, **groups.get(kind, {}))
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
        **{
            f"no gradients {call}": no_gradients(rank, world, call)
            for call in ("norm optimizer", "norm params", "value params", "ensure")
        },
        "fsdp1_nothing_here": fsdp1_nothing_here(rank, world),
        **{
            f"guarded {k} {c}": guarded(rank, world, k, c)
            for k in ("groups", "ddp", "fsdp1", "fsdp2")
            for c in both
        },
        "core_disagrees": core_disagrees(rank, world),
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
