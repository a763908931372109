"""Accumulate the gradients of several micro-batches per step, all with the same loss scale.

    python -m recipes run accumulation [precision=bf16] [key=value ...]

The loss scale must not change between the micro-batches of a step. The recipe therefore calls ``scaler.step``
and ``scaler.update`` once per accumulation window, after the last micro-batch. The loss of each micro-batch
is divided by the number of micro-batches. The accumulated gradients then equal the gradients of one large
batch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track
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
)


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    batch_size: int = 16
    micro_batches: int = number(4, least=1)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"accumulation, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = DigitsNet(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps * config.micro_batches, device=config.device)
    for _ in track(range(config.steps), "training"):
        optimizer.zero_grad()
        mean = torch.zeros((), device=config.device)
        for images, labels in islice(batches, config.micro_batches):
            with region:
                loss = cross_entropy(model(images), labels) / config.micro_batches
            scaler.scale(loss).backward()
            mean += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(mean, scaler, optimizer)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/accumulation"))
