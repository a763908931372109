"""FSDP2 shards parameters and gradients, and all ranks take or skip each step together.

    python -m recipes run fsdp2 [precision=bf16] [key=value ...]

    torchrun --nproc-per-node 2 -m recipes run fsdp2 [key=value ...]

If the recipe is not started by torchrun, it starts its processes itself. The parameters are DTensors and stay
in fp32. Autocast casts the weights after they are gathered. Clipping uses the norm over all shards. The
scaler finds the device mesh in the gradients, so an overflow in one shard makes all ranks skip the step.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

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
    max_norm: float = number(1.0, above=0)
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
        record = TrainingRecord(title=f"FSDP2, {ranks} processes, {config.precision.value}")
        loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
        net = DigitsNet(config.width).to(config.device)
        mesh = init_device_mesh(config.device, (ranks,))
        fully_shard(net.classifier, mesh=mesh)  # shard this layer separately, like one block of a large model
        model = fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)

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
            norm = scaler.clip_grad_norm_(optimizer, config.max_norm)
            scaler.step(optimizer)
            scaler.update()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            record.add_scaled_step(mean, scaler, optimizer)
            record.add_to_curve("gradient norm of all shards", norm)
        record.seconds = time.perf_counter() - start
        record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/fsdp2"))
