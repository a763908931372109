"""Train with LBFGS, whose closure calls backward on the scaled loss and returns the unscaled loss.

    python -m recipes run lbfgs [precision=bf16] [key=value ...]

LBFGS calls its closure many times per step. ``scaler.step(optimizer, closure)`` unscales the gradients of
each closure call before the optimizer uses them. If the gradients of one closure call overflow, the step is
abandoned, and the weights and the optimizer state are restored. The closure returns the unscaled loss,
because the line search of LBFGS compares loss values.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast
from recipes.shared import (
    CLASSES,
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

    steps: int = 8
    batch_size: int = 2000
    learning_rate: float = 1.0
    iterations: int = number(8, least=1)
    width: int = number(32, least=1)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"LBFGS, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, shift=False)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, config.width), nn.Tanh(), nn.Linear(config.width, CLASSES)
    ).to(config.device)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        config.learning_rate,
        max_iter=config.iterations,
        line_search_fn="strong_wolfe",
    )

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    calls: list[float] = []  # the losses of all calls in a step
    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        calls.clear()

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            with region:
                loss = cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            calls.append(float(loss.detach()))
            return loss.detach()

        scaler.step(optimizer, closure)
        scaler.update()
        record.add_scaled_step(torch.tensor(calls[0]), scaler, optimizer)
        record.add_to_curve("calls of the closure", float(len(calls)))
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/lbfgs"))
