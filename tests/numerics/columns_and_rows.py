"""A feed-forward layer on one process, and the same layer whose weights two ranks share out by hand."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard
from torch.nn.functional import gelu, linear

from amp_plugin.numerics.compare import record_run
from tests.process_groups import leave

WIDTH, HIDDEN, BATCH, STEPS = 8, 24, 6, 2

NAMES = {"Whole": "Split", "Whole.up": "Split.columns", "Whole.down": "Split.rows"}
PLACEMENTS: dict[str, list[Placement]] = {
    "Split.columns.*": [Shard(0)],
    "Split.rows.weight": [Shard(1)],
}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Copy(torch.autograd.Function):
    """Give each rank the input, and add up the ranks' gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Reduce(torch.autograd.Function):
    """Add up the ranks' results."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Columns(nn.Module):
    def __init__(self, whole: nn.Linear, number: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(part.detach().chunk(2)[number].clone()) for part in (whole.weight, whole.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        return linear(Copy.apply(x), self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, whole: nn.Linear, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(2, 1)[number].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(linear(x, self.weight)) + self.bias


class Split(nn.Module):
    """The layer on this rank. ``number`` says which half of the weights it has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        whole = Whole()
        self.columns, self.rows = Columns(whole.up, number), Rows(whole.down, number)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(gelu(self.columns(x)))


def record(
    path: Path,
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    placements: dict[str, list[Placement]] | None = None,
    precision: str = "fp32",
) -> None:
    """Train and record."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    with record_run(path, mesh=mesh, placements=placements):
        for _ in range(STEPS):
            x, y = (torch.randn(BATCH, WIDTH, generator=data) for _ in range(2))
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                output = model(x)
            (output.float() - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def record_ranks(folder: Path) -> None:
    """On this rank of two, record healthy runs, and runs in which each rank has the other's half."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), dist.get_rank()
    for precision in ("fp32", "bf16"):
        record(folder / precision, Split(rank), mesh=mesh, placements=PLACEMENTS, precision=precision)
    record(folder / "swapped", Split(1 - rank), mesh=mesh, placements=PLACEMENTS)
    record(folder / "swapped, no placements", Split(1 - rank), mesh=mesh)
    leave()
