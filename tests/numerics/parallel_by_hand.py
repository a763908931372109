"""A small language model, sharded by hand over data, tensors and sequence. Bugs can be planted in it.

The ranks form a mesh of data x tensor. A batch is split along ``data``. Along ``tensor``, heads and hidden
features are split inside attention and feed-forward layers, and tokens are split outside of them.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn.functional import cross_entropy, dropout, embedding, gelu, linear, scaled_dot_product_attention

from amp_plugin.numerics.compare import record_run
from tests.process_groups import leave

WIDTH, HEADS, WORDS, TOKENS, BATCH, STEPS = 16, 4, 32, 8, 8, 2

# The weights that ranks along ``tensor`` share out, and how. The others are replicas.
PLACEMENTS = {
    "*.up.*": [Replicate(), Shard(0)],
    "*.out.weight": [Replicate(), Shard(1)],
    "*.down.weight": [Replicate(), Shard(1)],
}

BUGS = {  # name of the bug -> the mesh dimension along which ranks differ
    "no all-reduce of a norm's gradient": "tensor",
    "gradients reduced twice": "data",
    "a sum where a mean is due": "data",
    "shards gathered in the wrong order": "tensor",
    "dropout the same on shards": "tensor",
    "dropout differs on replicas": "tensor",
    "a weight not gathered after a step": "data",
    "a norm over local shards": "tensor",
    "a bias added before the reduce": "tensor",
    "a mean over unequal counts": "data",
    "gradients of tied weights not summed": "",  # the same on every rank
    "positions without the offset of the shard": "tensor",
    "a reduce in bf16": "data",
    "q, k and v interleaved otherwise": "tensor",
}


class Grid:
    """This rank's position on the mesh, and the collectives. Without a mesh it stands for one process."""

    def __init__(self, mesh: DeviceMesh | None, bug: str = "") -> None:
        self.bug = bug
        names = ("data", "tensor")
        # Read these now: a mesh computes them with tensors, which the recorder would record.
        self._counts = (
            dict.fromkeys(names, 1) if mesh is None else {name: mesh[name].size() for name in names}
        )
        self._places = {} if mesh is None else {name: mesh[name].get_local_rank() for name in names}
        self._groups = {} if mesh is None else {name: mesh[name].get_group() for name in names}

    def count(self, name: str) -> int:
        return self._counts[name]

    def place(self, name: str) -> int:
        return self._places.get(name, 0)

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Add up in place along a dimension of the mesh."""
        if self.count(name) > 1:
            dist.all_reduce(tensor, group=self._groups[name])
        return tensor

    def gathered(self, tensor: Tensor, dim: int, name: str = "tensor") -> Tensor:
        if self.count(name) == 1:
            return tensor
        # Not all_gather: in LocalTensorMode, torch gives the tensors of one group to all groups.
        parts = torch.empty_like(torch.cat([tensor] * self.count(name)))
        dist.all_gather_into_tensor(parts, tensor.contiguous(), group=self._groups[name])
        return torch.cat(parts.chunk(self.count(name)), dim)

    def own(self, tensor: Tensor, dim: int, name: str = "tensor") -> Tensor:
        """Return this rank's shard of a tensor. It is a view if ``dim`` is 0."""
        parts, place = tensor.chunk(self.count(name), dim), self.place(name)
        if isinstance(place, int):
            return parts[place].contiguous()
        return own_of_each(parts, place)


def own_of_each(parts: tuple[Tensor, ...], place: torch.SymInt) -> Tensor:
    """Return the shard of each rank that torch simulates in this process."""
    from torch.distributed._local_tensor import LocalTensor

    held = {
        rank: part._local_tensors[rank] if isinstance(part, LocalTensor) else part
        for rank, number in place.node._local_ints.items()
        for part in [parts[number]]
    }
    return LocalTensor({rank: part.contiguous() for rank, part in held.items()})


class Gather(torch.autograd.Function):
    """Gather tokens before a layer that is split over features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        whole = grid.gathered(x, 1)
        if grid.bug == "shards gathered in the wrong order":
            whole = torch.cat(whole.chunk(grid.count("tensor"), 1)[::-1], 1)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.own(ctx.grid.sum(gradient.contiguous(), "tensor"), 1), None


class Scatter(torch.autograd.Function):
    """Add up the ranks' results, and split the tokens again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return grid.own(grid.sum(x.clone(), "tensor"), 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.gathered(gradient, 1), None


class Rows(nn.Module):
    """A linear layer that is split over its input features. The bias is added once."""

    def __init__(self, inputs: int, outputs: int, grid: Grid) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias, self.grid = nn.Parameter(grid.own(whole.weight.detach(), 1)), whole.bias, grid

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.bug == "a bias added before the reduce":
            return Scatter.apply(linear(x, self.weight, self.bias), self.grid)
        return Scatter.apply(linear(x, self.weight), self.grid) + self.bias


class Columns(nn.Module):
    """A linear layer that is split over its output features. Each of ``parts`` is split equally."""

    def __init__(self, inputs: int, outputs: int, grid: Grid, parts: int = 1) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        if grid.bug == "q, k and v interleaved otherwise":
            parts = 1

        def own(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(torch.cat([grid.own(part, 0) for part in tensor.detach().chunk(parts)]))

        self.weight, self.bias, self.grid = own(whole.weight), own(whole.bias), grid

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, grid: Grid, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Columns(WIDTH, 3 * WIDTH, grid, parts=3), Rows(WIDTH, WIDTH, grid)
        self.up, self.down = Columns(WIDTH, 4 * WIDTH, grid), Rows(4 * WIDTH, WIDTH, grid)
        self.grid, self.number = grid, number

    def forward(self, x: Tensor, drop: Callable[..., Tensor]) -> Tensor:
        whole = drop(Gather.apply(self.norm1(x), self.grid), self.number, is_shard=False)
        parts = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(whole).chunk(3, -1)
        ]
        mixed = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + drop(self.out(mixed), self.number, is_shard=True)
        return x + self.down(gelu(self.up(Gather.apply(self.norm2(x), self.grid))))


class Net(nn.Module):
    def __init__(self, grid: Grid, *, is_tied: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(grid, number) for number in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight if is_tied else nn.Parameter(self.words.weight.detach().clone())
        self.grid = grid

    def forward(self, tokens: Tensor, drop: Callable[..., Tensor]) -> Tensor:
        own = self.grid.own(tokens, 1)
        start = self.grid.place("tensor") * own.shape[1]
        if self.grid.bug == "positions without the offset of the shard":
            start = 0
        x = self.words(own) + embedding(torch.arange(start, start + own.shape[1]), self.positions.weight)
        for block in self.blocks:
            x = block(x, drop)
        return self.head(self.norm(x))


def dropout_of(grid: Grid, step: int, rate: float) -> Callable[..., Tensor]:
    """Return a dropout that is the same on ranks with the same tensor, and differs on ranks with shards."""

    def drop(x: Tensor, number: int, *, is_shard: bool) -> Tensor:
        if not rate:
            return x
        differs = is_shard
        if grid.bug == "dropout the same on shards":
            differs = False
        if grid.bug == "dropout differs on replicas":
            differs = True
        with torch.random.fork_rng():
            seed = 1000 * step + 100 * number + 10 * grid.place("data") + is_shard
            torch.manual_seed(5 * seed + (grid.place("tensor") if differs else 0))
            return dropout(x, rate)

    return drop


def reduce_gradients(net: Net, grid: Grid) -> None:
    """Add gradients over shards of the tokens, and average them over shards of the batch."""
    for name, weight in net.named_parameters():
        if not is_shared_out(name):
            is_left_out = grid.bug == "no all-reduce of a norm's gradient" and name == "blocks.1.norm1.weight"
            if not is_left_out:
                grid.sum(weight.grad, "tensor")
        reduced = weight.grad.bfloat16() if grid.bug == "a reduce in bf16" else weight.grad
        grid.sum(reduced, "data")
        if grid.bug == "gradients reduced twice":
            grid.sum(reduced, "data")
        if reduced is not weight.grad:
            weight.grad.copy_(reduced)
        if grid.bug != "a sum where a mean is due":
            weight.grad.div_(grid.count("data"))


def is_shared_out(name: str) -> bool:
    """Return True if ranks along ``tensor`` hold shards of a weight."""
    return any(layer in name for layer in ("qkv", "up.")) or name.endswith(("out.weight", "down.weight"))


def clip(net: Net, grid: Grid, largest: float) -> None:
    """Clip gradients by the norm over all shards."""
    # its weight is tied
    weights = {name: weight for name, weight in net.named_parameters() if name != "head.weight"}
    squares = {name: weight.grad.square().sum() for name, weight in weights.items()}
    shards = torch.stack([square for name, square in squares.items() if is_shared_out(name)]).sum()
    if grid.bug != "a norm over local shards":
        grid.sum(shards, "tensor")
    replicas = torch.stack([square for name, square in squares.items() if not is_shared_out(name)]).sum()
    factor = (largest / (shards + replicas).sqrt()).clamp(max=1.0)
    for weight in net.parameters():
        weight.grad.mul_(factor)


def record(
    path: Path,
    mesh: DeviceMesh | None,
    bug: str = "",
    *,
    rate: float = 0.0,
    seed: int = 0,
    steps: int = STEPS,
    simulation: AbstractContextManager[object] | None = None,
    placements: dict[str, list[Placement]] | None = None,
) -> None:
    """Train and record. With a mesh the model is sharded, else there is one process."""
    generator = torch.Generator().manual_seed(3 + seed)
    data = [torch.randint(0, WORDS, (BATCH, TOKENS + 1), generator=generator) for _ in range(steps)]
    with simulation or nullcontext():
        train(path, mesh, bug, data, rate=rate, seed=seed, placements=placements)


def train(
    path: Path,
    mesh: DeviceMesh | None,
    bug: str,
    data: list[Tensor],
    *,
    rate: float,
    seed: int,
    placements: dict[str, list[Placement]] | None,
) -> None:
    torch.manual_seed(seed)
    grid = Grid(mesh, bug)
    net = Net(grid, is_tied=mesh is None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record_run(path, steps=len(data), mesh=mesh, placements=placements):
        for step, tokens in enumerate(data):
            inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
            targets[: BATCH // 2, : TOKENS // 2] = -100  # the first half of the batch has fewer targets
            inputs, targets = grid.own(inputs, 0, "data"), grid.own(targets, 0, "data")
            logits = net(inputs, dropout_of(grid, step, rate))
            own = grid.own(targets, 1)
            losses = cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum", ignore_index=-100)
            count = (targets >= 0).sum().float()
            if bug != "a mean over unequal counts":
                count = grid.sum(count, "data") / grid.count("data")
            (losses / count).backward()
            if mesh is not None and bug != "gradients of tied weights not summed":
                net.words.weight.grad += net.head.weight.grad
                net.head.weight.grad.copy_(net.words.weight.grad)
            reduce_gradients(net, grid)
            clip(net, grid, 1.0)
            step_shards(net, grid, optimizer)
            optimizer.zero_grad()


def step_shards(net: Net, grid: Grid, optimizer: torch.optim.Optimizer) -> None:
    """Take a step.

    For one weight, each rank along ``data`` keeps only its own rows and gathers the others.
    """
    weight = net.blocks[1].up.weight.detach()
    before = weight.clone()
    optimizer.step()
    if grid.count("data") > 1:
        own = grid.own(weight, 0, "data").clone()
        weight.copy_(before)
        grid.own(weight, 0, "data").copy_(own)
        if grid.bug != "a weight not gathered after a step":
            weight.copy_(grid.gathered(own, 0, "data"))


def record_all(folder: Path, bugs: list[str], seed: int = 0, steps: int = STEPS) -> None:
    """On this rank of four, record a healthy run, one with dropout, and one for each bug."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    options = {"seed": seed, "steps": steps}
    record(folder / "healthy.amp", mesh, **options)
    record(folder / "dropout.amp", mesh, rate=0.2, **options)
    for bug in bugs:
        record(folder / f"{bug}.amp", mesh, bug, rate=0.2 if "dropout" in bug else 0.0, **options)
    leave()


def record_simulated(folder: Path, bugs: list[str]) -> None:
    """In this process, record a healthy run of four ranks that torch simulates, and one for each bug."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for bug in ("", *bugs):
        record(folder / f"{bug or 'healthy'}.amp", mesh, bug, simulation=LocalTensorMode(4))


def record_alone(folder: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Record the healthy runs on one process."""
    assert "RANK" not in os.environ
    record(folder / "one.amp", None, seed=seed, steps=steps)
    record(folder / "one dropout.amp", None, rate=0.2, seed=seed, steps=steps)
