"""A small transformer, by default of two layers, 16 wide, and the layouts in which several ranks train it."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from amp_plugin.numerics.compare import record_run

HEADS, WORDS, BATCH = 4, 32, 8


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.head_width = nn.Linear(width, width), width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        parts = [layer(x).unflatten(-1, (-1, self.head_width)) for layer in layers]
        mixed = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """One way to train: layout, precision, optimizer, clipping, and number of micro-batches.

    With ``local_norm`` each rank clips by the norm of its own shards, which is wrong.
    """

    layout: str = "one"
    precision: str = "fp32"
    optimizer: str = "SGD"
    clip: bool = False
    micro_batches: int = 1
    steps: int = 2
    seed: int = 0
    width: int = 16
    depth: int = 2
    tokens: int = 8
    local_norm: bool = False

    @property
    def name(self) -> str:
        """The options that are not the default ones."""
        parts = [self.layout, self.precision, self.optimizer, *(["clip"] if self.clip else [])]
        for option in ("micro_batches", "steps", "seed", "width", "depth", "tokens", "local_norm"):
            value = getattr(self, option)
            if value != getattr(Case, option):
                parts.append(f"{option}{value}")
        return "-".join(parts)

    @property
    def alone(self) -> "Case":
        """Return the same case on one process, with the whole batch."""
        return replace(self, layout="one", micro_batches=1, local_norm=False)


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def tensor_plan(depth: int, *, sequence: bool) -> dict[str, object]:
    into, out = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    plan: dict[str, object] = {
        "words": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        ),
        "head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()
        ),
    }
    for number in range(depth):
        block = f"blocks.{number}"
        plan |= {f"{block}.attention.{name}": into for name in ("query", "key", "value")}
        plan |= {
            f"{block}.attention.out": out,
            f"{block}.feed_forward.up": into,
            f"{block}.feed_forward.down": out,
        }
        if sequence:
            gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{block}.norm1": SequenceParallel(), f"{block}.norm2": SequenceParallel()}
            plan |= {f"{block}.attention": gather, f"{block}.feed_forward": gather}
    if sequence:
        plan["norm"] = SequenceParallel()
    return plan


def mesh_of(layout: str) -> DeviceMesh | None:
    count = ranks()
    shapes = {
        "fsdp2": ((count,), ("data",)),
        "hsdp": ((2, count // 2), ("replicas", "shards")),
        "tp": ((count,), ("tensor",)),
        "sp": ((count,), ("tensor",)),
        "fsdp_tp": ((2, count // 2), ("data", "tensor")),
    }
    if layout not in shapes:
        return None
    shape, names = shapes[layout]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(net: Transformer, mesh: DeviceMesh, precision: str) -> None:
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def flattened(net: Transformer, case: Case) -> nn.Module:
    """Wrap a model with FSDP1: fsdp1 keeps the original parameters, fsdp1_flat has flat ones.

    fsdp1_hybrid shares them out over two ranks, and the other two have the same.
    """
    is_hybrid, policy = case.layout == "fsdp1_hybrid", None
    if case.precision == "bf16":
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=policy,
        use_orig_params=case.layout != "fsdp1_flat",
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        if is_hybrid
        else None,
        device_id=torch.device("cpu"),
    )


def prepared(net: Transformer, case: Case, mesh: DeviceMesh | None) -> nn.Module:
    """Prepare a model for a layout."""
    if case.layout == "ddp":
        return DistributedDataParallel(net)
    if case.layout.startswith("fsdp1"):
        return flattened(net, case)
    if case.layout in {"tp", "sp"}:
        parallelize_module(net, mesh, tensor_plan(case.depth, sequence=case.layout == "sp"))
    elif case.layout == "fsdp_tp":
        parallelize_module(net, mesh["tensor"], tensor_plan(case.depth, sequence=False))
        shard(net, mesh["data"], case.precision)
    elif mesh is not None:
        shard(net, mesh, case.precision)
    return net


def share(case: Case, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return which part of a batch this rank has, and the number of parts."""
    if case.layout in {"one", "tp", "sp"}:
        return 0, 1
    if case.layout == "fsdp_tp":
        return mesh["data"].get_local_rank(), mesh["data"].size()
    return dist.get_rank(), dist.get_world_size()


def batches(case: Case) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7 + case.seed)
    for _ in range(case.steps):
        yield torch.randint(0, WORDS, (BATCH, case.tokens + 1), generator=generator)


def record(path: Path, case: Case, change: Callable[[nn.Module], None] = lambda _: None) -> None:
    """Train in a layout and record the run."""
    train_with(path, case, [*batches(case)], change)


def train_with(path: Path, case: Case, data: list[Tensor], change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(case.seed)
    net, mesh = Transformer(case.width, case.depth), mesh_of(case.layout)
    change(net)
    model = prepared(net, case, mesh)
    optimizer = getattr(torch.optim, case.optimizer)(
        model.parameters(), lr=0.1 if case.optimizer == "SGD" else 0.01
    )
    number, count = share(case, mesh)
    is_sharded = mesh is not None or case.layout.startswith("fsdp1")
    is_cast = case.precision == "bf16" and (not is_sharded or case.layout in {"tp", "sp"})
    with record_run(path, steps=case.steps):
        for tokens in data:
            own = tokens.chunk(count)[number]
            for micro in own.chunk(case.micro_batches):
                with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
                    logits = model(micro[:, :-1])
                loss = (
                    cross_entropy(logits.float().flatten(0, 1), micro[:, 1:].flatten()) / case.micro_batches
                )
                loss.backward()
            if case.clip and isinstance(model, FullyShardedDataParallel) and not case.local_norm:
                model.clip_grad_norm_(0.5)
            elif case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def record_all(folder: Path, cases: list[Case]) -> None:
    """Record several cases on this rank, one after another."""
    folder.mkdir(exist_ok=True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for case in cases:
        record(folder / f"{case.name}.amp", case)
    if dist.is_initialized():
        from tests.process_groups import leave

        leave()


def record_simulated(folder: Path, count: int, cases: list[Case]) -> None:
    """Record several cases on ranks that torch simulates in this process."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    for case in cases:
        data = [*batches(case)]  # a generator that is given explicitly advances at each rank
        with LocalTensorMode(count):
            train_with(folder / f"{case.name}.amp", case, data, lambda _: None)
