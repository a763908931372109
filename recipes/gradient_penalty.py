"""Train with a gradient penalty, the squared norm of the loss's gradients with respect to the images.

    python -m recipes run gradient_penalty [precision=bf16] [key=value ...]

``gradient_penalty`` differentiates the scaled loss, so that small gradients do not underflow. The gradients
are divided by the loss scale before they are squared. The sum of loss and penalty is then scaled like any
other loss. The recipe penalizes the gradients with respect to the images (Drucker and LeCun 1992). The
penalty makes the classifier less sensitive to single pixels.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast
from amp_plugin.scaling import gradient_penalty
from recipes.shared import (
    DigitsNet,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
)

PENALTY = "penalty (squared norm)"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    weight: float = number(0.1, least=0)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"gradient penalty, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = DigitsNet(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        images.requires_grad_()
        with region:
            loss = cross_entropy(model(images), labels)
        penalty = gradient_penalty(loss * len(images), images, scaler=scaler) / len(images)
        scaler.scale(loss + config.weight * penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
        record.add_to_curve(PENALTY, penalty)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/gradient_penalty"))
