"""Train with DDP, where all ranks average their gradients and take or skip each step together.

    python -m recipes run ddp [precision=bf16] [key=value ...]

    torchrun --nproc-per-node 2 -m recipes run ddp [key=value ...]

If the recipe is not started by torchrun, it starts its processes itself. DDP averages gradients that are
still multiplied by the loss scale. The average spreads an overflow on one rank to all ranks. After such an
overflow, all ranks skip the optimizer step, and their loss scales stay equal. Each batch is divided between
the ranks, and the losses equal those of a single process that trains on the whole batch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from amp_plugin import GradScaler, autocast
from recipes.shared import (
    DigitsNet,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
    on_ranks,
    process_group,
)


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    processes: int = number(2, least=1)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier on several processes and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    return on_ranks(train_rank, config, config.processes)


def train_rank(config: Config) -> TrainingRecord:
    """Train one rank. All ranks return the same losses."""
    config.start()
    with process_group(config.device) as (rank, ranks):
        record = TrainingRecord(title=f"DDP, {ranks} processes, {config.precision.value}")
        loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
        net = DigitsNet(config.width).to(config.device)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

        region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
        scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

        start = time.perf_counter()
        batches = digits_batches(loaders, steps=config.steps, device=config.device)
        for images, labels in track(batches, "training", total=config.steps, disable=rank > 0):
            optimizer.zero_grad()
            share = ranks / len(images)
            with region:
                logits = model(images[rank::ranks])
                loss = share * cross_entropy(logits, labels[rank::ranks], reduction="sum")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            record.add_scaled_step(mean, scaler, optimizer)
        record.seconds = time.perf_counter() - start
        record.test_accuracy = accuracy(net, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/ddp"))
