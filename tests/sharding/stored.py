"""The program of test_stored_shards.py, in four processes. Each writes FOLDER/rankN.json.

Each case runs twice: with float32 shards, and with stored ones. First, pairs of ranks train FSDP2 at the same
time. Then all four ranks train HSDP and two-dimensional meshes together.
"""

import itertools
import json
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lion_pytorch import Lion
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from amp_plugin import GradScaler, autocast, dtype_report, log_collectives, store_weights
from amp_plugin.weights.fsdp2 import gathered_dtypes
from amp_plugin.weights.shard import StoredShard, local_of
from amp_plugin.weights.store import weight_bytes
from tests.process_groups import leave

BF16, FP32 = torch.bfloat16, torch.float32
STEPS, FEW, POISONED = 50, 5, 2
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Lion": lambda params: Lion(params, lr=1e-3),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),  # has no rule, so torch's own step runs
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x).to(x.dtype))))


class Net(nn.Module):
    """A model with uneven and empty shards, a tied weight, a frozen layer and a checkpointed block."""

    def __init__(self, seed, *, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.inp, self.blocks = nn.Linear(4, 6), nn.ModuleList(Block() for _ in range(2))
        self.mix, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.again.weight = self.mix.weight
        self.base, self.odd, self.head = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.Linear(6, 5),
            nn.Linear(5, 1),
        )

    def forward(self, x):
        y = self.blocks[0](self.inp(x))
        y = checkpoint(self.blocks[1], y, use_reentrant=False)
        y = self.again(torch.tanh(self.mix(y))) + self.base(y)
        return self.head(self.odd(y))


@dataclass
class Layout:
    """How the ranks are divided.

    Attributes:
        mesh: The mesh for FSDP2. If it has two dimensions, the first one replicates.
        parallel: The mesh for tensor parallelism.
        share: Which rows belong to this rank.
        options: Options of ``fully_shard``.
        before: Whether weights are stored before they are sharded.
    """

    mesh: object = None
    parallel: object = None
    share: int = 0
    options: dict = field(default_factory=dict)
    before: bool = False


def policy(param_dtype=BF16):
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=FP32, cast_forward_inputs=param_dtype is BF16
    )


def shard(net, layout):
    if layout.parallel is not None:
        ways = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(net, layout.parallel, ways)
    if layout.mesh is None:
        return net
    options = {"mesh": layout.mesh, **layout.options}
    for block in net.blocks:
        fully_shard(block.norm, mp_policy=policy(FP32), **options)
        fully_shard(block, mp_policy=policy(), **options)
    return fully_shard(net, mp_policy=policy(), **options)


def batch(step, micro, share):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + share)
    x = torch.randn(3, 4, generator=generator)
    y = x.sum(1, keepdim=True).cos()
    return (x * torch.inf if (step, micro, share) == (POISONED, 0, 1) else x), y


def shards(net):
    """Return this rank's exact weights as one flat tensor, including unsharded parameters."""
    return torch.cat([local_of(value).flatten() for value in net.state_dict().values()])


def ties(row):
    return int(((row.view(torch.int32) & 0xFFFF) == 0x8000).sum())


@dataclass
class Trained:
    weights: torch.Tensor  # one row per step
    skipped: list
    how: str
    ties: int
    net: nn.Module
    optimizer: torch.optim.Optimizer
    last: Counter  # collectives of the last step


def train(layout, make, *, stored, steps, seed, state="fp32", one_pass=True, weights="bf16"):
    """Train with two micro-batches per step and a clip. One batch is poisoned on one rank."""
    # Gradients of a tied weight are added in float32 in an unsharded stored model, but in bfloat16 under
    # autocast.
    net = Net(seed, tied=layout.mesh is not None)
    if stored and layout.before:
        store_weights(net, weights=weights, state=state)
    shard(net, layout)
    optimizer = make([param for param in net.parameters() if param.requires_grad])
    if (stored and not layout.before) or state != "fp32":
        store_weights(net, optimizer, weights=weights if stored else "fp32", state=state)
    scaler = GradScaler("cpu", enabled=False, one_pass=one_pass)
    rows, skipped = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with log_collectives() as log:
            for micro in range(2):
                if layout.mesh is not None:
                    net.set_requires_gradient_sync(micro == 1)
                x, y = batch(step, micro, layout.share)
                with autocast("cpu", dtype=BF16, enabled=layout.mesh is None):
                    out = net(x)
                (nn.functional.mse_loss(out.float(), y) / 2).backward()
            scaler.clip_and_step(optimizer, 0.05)
        skipped.append(bool(scaler.last_step(optimizer).skipped))
        rows.append(shards(net))
    found = torch.stack(rows)
    calls = Counter((call.op, call.dtype, call.elements, call.bytes) for call in log)
    return Trained(
        found, skipped, scaler.last_step(optimizer).how, sum(map(ties, rows)), net, optimizer, calls
    )


def compared(group, layout, name, steps, **options):
    """Train float32 shards and stored ones, with a seed without ties, which pairs round differently."""
    for seed in range(8):
        plain = train(layout, OPTIMIZERS[name], stored=False, steps=steps, seed=seed, **options)
        any_ties = torch.tensor(plain.ties)
        dist.all_reduce(any_ties, group=group)
        if not any_ties:
            break
    stored = train(layout, OPTIMIZERS[name], stored=True, steps=steps, seed=seed, **options)
    names = dict(stored.net.named_parameters())
    return {
        "ties": int(any_ties),
        "equal": (plain.weights == stored.weights).all(1).tolist(),
        "moved": (stored.weights[-1] - stored.weights[0]).abs().max().item(),
        "skipped": [plain.skipped, stored.skipped],
        "how": stored.how,
        "not stored": [key for key, param in names.items() if not isinstance(local_of(param), StoredShard)],
        "empty": [key for key, param in names.items() if local_of(param).numel() == 0],
        "collectives": [sum(run.last.values()) for run in (plain, stored)],
        "carried": [sum(bytes_ * n for (*_, bytes_), n in run.last.items()) for run in (plain, stored)],
        "dtypes": sorted({dtype for op, dtype, *_ in stored.last if op == "all_gather"}),
    }


def alone_in_pairs(inside, pair):
    """Run cases that need two ranks.

    One pair of ranks runs the first half, the other pair the second half.
    """
    share = inside.get_local_rank()
    layout = Layout(mesh=inside, share=share)
    offloaded = Layout(
        mesh=inside, share=share, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    )
    in_parallel = Layout(parallel=inside, share=1)
    cases = [
        ("AdamW", layout, {"steps": STEPS}),
        ("own step", layout, {"one_pass": False}),
        ("before", Layout(mesh=inside, share=share, before=True), {}),
        ("ASGD", layout, {}),
        ("8bit", layout, {"state": "8bit"}),
        ("SGD", layout, {"steps": STEPS}),
        ("Lion", layout, {"steps": STEPS}),
        ("offloaded", offloaded, {}),
        ("tensor parallel", in_parallel, {"steps": STEPS}),
    ]
    own = cases[: len(cases) // 2 + 1] if pair == 0 else cases[len(cases) // 2 + 1 :]
    return [(name, layout, name if name in OPTIMIZERS else "AdamW", options) for name, layout, options in own]


def all_together():
    rank = dist.get_rank()
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parallel"))
    two_dimensional = Layout(mesh=parallel["shards"], parallel=parallel["parallel"], share=rank // 2)
    return [
        ("hsdp", Layout(mesh=replicated, share=rank), "AdamW", {}),
        ("two-dimensional", two_dimensional, "AdamW", {}),
        (
            "no reshard",
            Layout(mesh=replicated, share=rank, options={"reshard_after_forward": False}),
            "SGD",
            {},
        ),
    ]


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
        "stored": str(unit.stored),
        "local_bytes": unit.local_bytes,
    }


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


def checkpoints(folder, inside):
    """Save a stored run and a float32 run on four ranks. Each pair of ranks loads both and continues
    training.

    Both are loaded into a model with stored weights and into a float32 model.
    """
    everybody = init_device_mesh("cpu", (4,))
    share, saved = dist.get_rank(), {}
    for stored in (False, True):
        run = train(Layout(mesh=everybody, share=share), OPTIMIZERS["AdamW"], stored=stored, steps=3, seed=0)
        path = Path(folder, f"stored {stored}")
        model, optimizer = get_state_dict(run.net, run.optimizer)
        dtypes = {str(value.dtype) for value in model.values()}
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        full = {name: value.full_tensor() for name, value in model.items()}
        saved[stored] = path, whole(run.net), full
    report = {
        "dtypes": sorted(dtypes),
        "equal": torch.equal(saved[True][1], saved[False][1]),
        "loaded": [],
        "full": [],
    }
    ends = []
    for of_stored, into_stored in itertools.product((False, True), repeat=2):
        path, weights, full = saved[of_stored]
        layout = Layout(mesh=inside, share=inside.get_local_rank())
        run = train(layout, OPTIMIZERS["AdamW"], stored=into_stored, steps=1, seed=5)
        model, optimizer = get_state_dict(run.net, run.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path, process_group=inside.get_group())
        set_state_dict(
            run.net, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        report["loaded"].append(torch.equal(whole(run.net), weights))
        ends.append(go_on(run, layout))
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(run.net, full, options=options)
        report["full"].append(torch.equal(whole(run.net), weights))
        is_stored = {isinstance(local_of(param), StoredShard) for param in run.net.inp.parameters()}
        report.setdefault("still stored", []).append(is_stored == {into_stored})
    report["ends"] = [torch.equal(end, ends[0]) for end in ends]
    return report


def whole(net):
    return torch.cat([value.full_tensor().flatten() for value in net.state_dict().values()])


def go_on(run, layout):
    """Take three more steps."""
    for step in range(10, 13):
        run.optimizer.zero_grad()
        x, y = batch(step, 0, layout.share)
        nn.functional.mse_loss(run.net(x).float(), y).backward()
        run.optimizer.step()
    return whole(run.net)


def main(folder, whole):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "inside"))
    inside, pair = pairs["inside"], pairs.get_local_rank("pairs")
    report = {}
    for group, cases in (
        (inside.get_group(), alone_in_pairs(inside, pair)),
        (dist.group.WORLD, all_together()),
    ):
        for name, layout, optimizer, options in cases:
            try:
                options["steps"] = STEPS if whole else options.get("steps", FEW)
                report[name] = compared(group, layout, optimizer, **options)
            except Exception:  # noqa: BLE001 -- the test shows it, and the other cases go on
                report[name] = {"error": traceback.format_exc()}
    parts = {part.__name__: partial(part, inside) for part in (counted, refusals, gathered)}
    for name, part in {**parts, "checkpoints": partial(checkpoints, folder, inside)}.items():
        try:
            report[name] = part()
        except Exception:  # noqa: BLE001
            report[name] = {"error": traceback.format_exc()}
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()
