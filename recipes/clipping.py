"""Clip the norm of the unscaled gradients, or clip each element of the unscaled gradients.

    python -m recipes run clipping [precision=bf16] [key=value ...]

``scaler.clip_grad_norm_`` can be called anywhere between ``backward()`` and ``step()``. ``clip_grad_norm_``
first unscales all gradients that are still scaled, even if the optimizer is fused. ``clip_grad_norm_``
returns the norm that the unscaled gradients had before clipping. torch's own ``clip_grad_norm_`` would clip
gradients that are still multiplied by the loss scale.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
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

    learning_rate: float = 0.15
    max_norm: float = number(1.0, above=0)
    max_value: float = number(0.0, least=0)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"clipping, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = DigitsNet(config.width).to(config.device)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, config.max_norm)
        if config.max_value:
            scaler.clip_grad_value_(optimizer, config.max_value)
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
        record.add_to_curve("gradient norm, unclipped", norm)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/clipping"))
