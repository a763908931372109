"""Compare a run on one process with a correct FSDP2 run, and with an FSDP2 run that has a deliberate bug.

    python -m recipes.compare_layouts FOLDER

A classifier trains for three steps on one process with the whole batch. The same classifier then trains on
two processes with FSDP2, each with half of the batch. The third run has a deliberate bug. In this run,
``ignored_params`` excludes the last layer from FSDP2. The gradients of the excluded layer are not averaged,
so the weights of this layer drift apart between the ranks. The loss still falls.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from amp_plugin.numerics.compare import RunComparison, compare_runs, record_run
from recipes.shared import CLASSES, digits_batches, digits_loaders, on_ranks, process_group

STEPS, BATCH, PROCESSES = 3, 64, 2


@dataclass(frozen=True)
class Run:
    """One run to record."""

    path: Path
    is_sharded: bool = True
    forgets_last: bool = False
    device: str = "cpu"


class Classifier(nn.Module):
    """Classifies a digit from its 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, ``[B, 10]``, of ``images [B, 1, 8, 8]``."""
        return self.last(self.first(images.flatten(1)).relu())  # type: ignore[no-any-return]


def train(run: Run) -> float:
    """Train one rank of a run and record it. Return the last loss."""
    with process_group(run.device) as (rank, ranks):
        torch.manual_seed(0)
        model = Classifier()
        if run.is_sharded:
            mesh = dist.init_device_mesh(run.device, (ranks,), mesh_dim_names=("data",))
            left_out = set(model.last.parameters()) if run.forgets_last else None
            fully_shard(model, mesh=mesh, ignored_params=left_out)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = digits_batches(digits_loaders(batch_size=BATCH, seed=0), steps=STEPS, device=run.device)
        with record_run(run.path, steps=STEPS):
            for images, labels in batches:
                loss = cross_entropy(model(images.chunk(ranks)[rank]), labels.chunk(ranks)[rank])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return float(loss.detach())


def compare(folder: Path) -> dict[str, RunComparison]:
    """Record all runs in a folder. Compare each run on two processes with the run on one process."""
    on_ranks(train, Run(folder / "one.amp", is_sharded=False), 1)
    runs = {
        "FSDP2": Run(folder / "fsdp2.amp"),
        "FSDP2 without the last layer": Run(folder / "forgotten.amp", forgets_last=True),
    }
    found = {}
    for name, run in runs.items():
        on_ranks(train, run, PROCESSES)
        found[name] = compare_runs(folder / "one.amp", run.path)
    return found


if __name__ == "__main__":
    for title, comparison in compare(Path(sys.argv[1])).items():
        print(f"{title}\n{comparison.report()}\n")
