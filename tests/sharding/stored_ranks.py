"""The program of test_stored_shards.py, in four processes. Each writes FOLDER/rankN.json.

Each case runs twice: with float32 shards, and with stored ones. First, pairs of ranks train different cases at
the same time. Then all four ranks train together.
"""

import ctypes
import gc
import itertools
import json
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from amp_plugin import dtype_report, store_weights
from amp_plugin.weights.fsdp2 import gathered_dtypes
from amp_plugin.weights.shard import StoredShard, local_of
from amp_plugin.weights.store import weight_bytes
from amp_plugin.weights.weight import stored_weight
from tests.process_groups import leave
from tests.sharding.stored import Layout, Net, go_on, policy, shard, train, whole

STEPS, FEW = 50, 5
M_MMAP_THRESHOLD = -3  # of malloc.h: larger blocks go back to Linux when they are freed
FIRST, SECOND, ALL = "the first pair", "the second pair", "all four ranks"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is made with float32 shards and with stored ones.

    Attributes:
        ranks: Which ranks make it.
        layout: A name in :func:`layouts_of_two` or :func:`layouts_of_four`.
        is_long: Whether it takes 50 steps in ``make test`` too. The others take 5.
        is_whole_run: Whether it is made in whole runs only.
    """

    ranks: str
    layout: str = "fsdp2"
    optimizer: str = "AdamW"
    state: str = "fp32"
    one_pass: bool = True
    is_long: bool = False
    is_whole_run: bool = False

    def steps(self, whole):
        return STEPS if whole or self.is_long else FEW


_OTHERS = {"SGD": {"optimizer": "SGD"}, "Lion": {"optimizer": "Lion"}, "8bit": {"state": "8bit"}}
CASES = {
    "AdamW": Case(ranks=FIRST, is_long=True),
    "own step": Case(ranks=FIRST, one_pass=False, is_whole_run=True),
    "before": Case(ranks=FIRST, layout="stored before"),
    "ASGD": Case(ranks=FIRST, optimizer="ASGD"),
    "8bit": Case(ranks=FIRST, state="8bit"),
    "SGD": Case(ranks=SECOND, optimizer="SGD"),
    "Lion": Case(ranks=SECOND, optimizer="Lion"),
    "offloaded": Case(ranks=SECOND, layout="offloaded"),
    "tensor parallel": Case(ranks=SECOND, layout="tensor parallel"),
    "hsdp": Case(ranks=ALL, layout="hsdp"),
    "two-dimensional": Case(ranks=ALL, layout="two-dimensional"),
    "no reshard": Case(ranks=ALL, layout="no reshard", optimizer="SGD", is_whole_run=True),
    **{
        f"{layout}, {name}": Case(ranks=ranks, layout=layout, is_whole_run=True, **options)
        for ranks, layout in ((FIRST, "tensor parallel"), (ALL, "hsdp"), (ALL, "two-dimensional"))
        for name, options in _OTHERS.items()
    },
}


def layouts_of_two(inside):
    own = {"share": inside.get_local_rank(), "is_poisoned": inside.get_local_rank() == 1}
    fsdp2 = Layout(mesh=inside, **own)
    return {
        "fsdp2": fsdp2,
        "stored before": replace(fsdp2, before=True),
        "offloaded": replace(fsdp2, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        "tensor parallel": Layout(parallel=inside, is_poisoned=own["is_poisoned"], is_tied=False),
    }


def layouts_of_four():
    rank = dist.get_rank()
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parallel"))
    hsdp = Layout(mesh=replicated, share=rank, is_poisoned=rank == 1)
    return {
        "fsdp2 of four": replace(hsdp, mesh=init_device_mesh("cpu", (4,))),
        "hsdp": hsdp,
        "no reshard": replace(hsdp, options={"reshard_after_forward": False}),
        "two-dimensional": replace(
            hsdp, mesh=both["shards"], parallel=both["parallel"], share=both.get_local_rank("shards")
        ),
    }


def compared(case, layout, group, steps):
    """Train float32 shards and stored ones, with a seed without ties, which pairs round differently."""
    run = partial(train, layout, case.optimizer, steps=steps, state=case.state, one_pass=case.one_pass)
    for seed in range(8):
        plain = run(stored=False, seed=seed)
        any_ties = torch.tensor(plain.ties)
        dist.all_reduce(any_ties, group=group)
        if not any_ties:
            break
    stored = run(stored=True, seed=seed)
    names = dict(stored.net.named_parameters())
    return {
        "ties": int(any_ties),
        "equal": (plain.weights == stored.weights).all(1).tolist(),
        "moved": (stored.weights[-1] - stored.weights[0]).abs().max().item(),
        "skipped": [plain.skipped, stored.skipped],
        "how": stored.how,
        "not stored": [name for name, param in names.items() if stored_weight(param) is None],
        "empty": [name for name, param in names.items() if local_of(param).numel() == 0],
        "collectives": [sum(run.last.values()) for run in (plain, stored)],
        "carried": [sum(bytes_ * n for (*_, bytes_), n in run.last.items()) for run in (plain, stored)],
        "dtypes": sorted({dtype for op, dtype, *_ in stored.last if op == "all_gather"}),
    }


def counted(mesh):
    """Return the bytes per parameter of a 512 x 512 layer with 8-bit states, after two steps."""
    net = fully_shard(nn.Linear(512, 512), mesh=mesh, mp_policy=policy())
    optimizer = torch.optim.AdamW(net.parameters())
    store_weights(net, optimizer, weights="bf16", state="8bit")
    for _ in range(2):
        net(torch.ones(1, 512)).float().sum().backward()
        optimizer.step()
    found = weight_bytes(net, optimizer)
    (unit,) = dtype_report(net).units
    return {
        "parameters": found.parameters,
        **found.per_parameter(),
        "stored": list(map(str, unit.stored)),
        "local_bytes": unit.local_bytes,
    }


def measured(mesh):
    """Return the bytes of this process per parameter of the whole model, as Linux counts them.

    They are those that a model of 8.4 million parameters adds, with its gradients and its optimizer, after two
    steps. The first run is not counted: libraries get memory in it that they keep.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    resident(mesh, "fp32")
    return {way: resident(mesh, way) for way in ("fp32", "8bit")}


def resident(mesh, way, width=2048):
    before = own_bytes()
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy())
    fully_shard(net, mesh=mesh, mp_policy=policy())
    optimizer = torch.optim.AdamW(net.parameters())
    if way != "fp32":
        store_weights(net, optimizer, weights="bf16", state=way)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, width)).float().sum().backward()
        optimizer.step()
    return (own_bytes() - before) / (2 * width * width)


def own_bytes():
    """Return the bytes of memory that this process has, without files and without what malloc could return."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return 1024 * int(kilobytes)


def refusals(mesh):
    """Return the errors for sharded models whose weights cannot be stored."""
    found = {}
    cases = {
        "gathered in fp32": (fully_shard(nn.Linear(4, 4), mesh=mesh), "bf16"),
        "in 16 bits": (fully_shard(nn.Linear(4, 4).bfloat16(), mesh=mesh), "bf16"),
        "true": (parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()), "bf16-true"),
    }
    for name, (net, weights) in cases.items():
        try:
            store_weights(net, weights=weights)
        except ValueError as error:
            found[name] = str(error)
    return found


def gathered(mesh):
    """Return whether the parameters that FSDP2 holds are the model's parameters."""
    net = shard(Net(0), Layout(mesh=mesh))
    return set(gathered_dtypes(net)) == set(net.parameters())


def state_of(run):
    model, optimizer = get_state_dict(run.net, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def load(run, layout, path):
    """Load a checkpoint in the ranks of a layout."""
    state, mesh = state_of(run), layout.mesh or layout.parallel
    if layout.mesh is not None and layout.parallel is not None:
        mesh = None  # all ranks
    group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
    is_alone = layout.mesh is None and layout.parallel is None
    dcp.load(state, checkpoint_id=path, process_group=group, no_dist=is_alone)
    set_state_dict(
        run.net, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def checkpoints(folder, four, two, is_whole_run):
    """Save a stored run and a float32 run on four ranks. Each pair of ranks loads both and continues training.

    Each kind loads the other kind. In a whole run it also loads its own kind.
    """
    saved = {}
    for stored in (False, True):
        run = train(four["fsdp2 of four"], stored=stored, steps=3)
        path = Path(folder, f"stored {stored}")
        state = state_of(run)
        dtypes = {str(value.dtype) for value in state["model"].values()}
        dcp.save(state, checkpoint_id=path)
        full = {name: value.full_tensor() for name, value in state["model"].items()}
        saved[stored] = path, whole(run.net.state_dict()), full
    report = {
        "dtypes": sorted(dtypes),
        "equal": torch.equal(saved[True][1], saved[False][1]),
        "loaded": [],
        "full": [],
        "still stored": [],
    }
    ends, layout = [], two["fsdp2"]
    pairs = itertools.product((False, True), repeat=2)
    for of_stored, into_stored in pairs if is_whole_run else [(False, True), (True, False)]:
        path, weights, full = saved[of_stored]
        run = train(layout, stored=into_stored, steps=1, seed=5)
        load(run, layout, path)
        report["loaded"].append(torch.equal(whole(run.net.state_dict()), weights))
        ends.append(go_on(run, layout))
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(run.net, full, options=options)
        report["full"].append(torch.equal(whole(run.net.state_dict()), weights))
        is_stored = {isinstance(local_of(param), StoredShard) for param in run.net.inp.parameters()}
        report["still stored"].append(is_stored == {into_stored})
    report["ends"] = [torch.equal(end, ends[0]) for end in ends]
    return report


# Where a checkpoint is loaded that four ranks have saved. Few runs load it on two ranks and on one.
LOADED_BY = ("tensor parallel", "one process", "fsdp2", "hsdp", "two-dimensional")
FEW_LOADED_BY = LOADED_BY[:2]


def layouts(folder, four, two, is_whole_run):
    """Save a stored run on a mesh of two dimensions. Float32 runs load it in two other layouts.

    In a whole run, three layouts save both kinds of runs, and both kinds load each in five layouts.
    """
    known = {"one process": Layout(), **two, **four}
    known = {name: replace(layout, is_tied=False) for name, layout in known.items()}
    if is_whole_run:
        sources = [*itertools.product(("fsdp2 of four", "hsdp", "two-dimensional"), (False, True))]
    else:
        sources = [("two-dimensional", True)]
    saved = {}
    for name, stored in sources:
        run, path = train(known[name], stored=stored, steps=3), Path(folder, f"{name}, {stored}")
        state = state_of(run)
        dcp.save(state, checkpoint_id=path)
        saved[name, stored] = path, [whole(state["model"]), whole(state["optimizer"]["state"])]
    report = {}
    for into in LOADED_BY if is_whole_run else FEW_LOADED_BY:
        ends = {}
        for stored in (False, True) if is_whole_run else (False,):
            run = train(known[into], stored=stored, steps=1, seed=5)
            for (name, was_stored), (path, values) in saved.items():
                load(run, known[into], path)
                state = state_of(run)
                found = [whole(state["model"]), whole(state["optimizer"]["state"])]
                key = f"{name}, {was_stored} into {into}, {stored}"
                report[key] = list(map(torch.equal, found, values))
                ends.setdefault(name, []).append(go_on(run, known[into]))
        for name, weights in ends.items():
            report[f"{name} continued as {into}"] = [torch.equal(weight, weights[0]) for weight in weights]
    return report


def main(folder, is_whole_run):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "inside"))
    inside, pair = pairs["inside"], (FIRST, SECOND)[pairs.get_local_rank("pairs")]
    two, four = layouts_of_two(inside), layouts_of_four()
    parts = {}
    for name, case in CASES.items():
        if case.ranks in {pair, ALL} and (is_whole_run or not case.is_whole_run):
            group = dist.group.WORLD if case.ranks == ALL else inside.get_group()
            layout = (four if case.ranks == ALL else two)[case.layout]
            parts[name] = partial(compared, case, layout, group, case.steps(is_whole_run))
    parts |= {part.__name__: partial(part, inside) for part in (counted, measured, refusals, gathered)}
    parts["checkpoints"] = partial(checkpoints, folder, four, two, is_whole_run)
    parts["layouts"] = partial(layouts, folder, four, two, is_whole_run)
    report = {}
    for name, part in parts.items():
        try:
            report[name] = part()
        except Exception:  # noqa: BLE001 -- the test shows it, and the other parts go on
            report[name] = {"error": traceback.format_exc()}
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()
