"""An imported module runs in fp32 inside an autocast region, and one of its arguments is never cast.

    python -m recipes run fp32_module [precision=bf16] [key=value ...]

``run_in(torch.float32)`` turns autocast off while the module runs, and casts its arguments to float32. The
module's code is not edited. ``keep`` names the arguments that ``run_in`` must not cast. In this recipe,
``keep`` names a buffer that the module writes to. If the buffer were cast, the module would write to a copy,
and the result would be lost.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast, run_in
from recipes.shared import (
    CLASSES,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
)

# The features and the centres are both multiplied by SIZE, to make squared distances overflow in fp16.
SIZE = 30.0


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    steps: int = 800
    learning_rate: float = 1e-2
    width: int = number(64, least=1)
    centres: int = number(40, least=1)
    keep_fp32: bool = True


class NearestCentres(nn.Module):
    """An example of an imported module. The module computes squared distances that are too large for fp16."""

    def __init__(self, width: int, centres: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(SIZE * torch.randn(centres, width))

    def forward(self, features: Tensor, used: Tensor) -> Tensor:
        """Return similarities ``[B, centres]``.

        The buffer ``used [centres]`` counts how often each center was the nearest one.
        """
        products = features @ self.centres.T
        distances = features.square().sum(1, keepdim=True) - 2 * products + self.centres.square().sum(1)
        nearest = distances.argmin(dim=1)
        used.add_(torch.bincount(nearest, minlength=len(used)).to(used.dtype))
        return -distances / SIZE**2


class Classifier(nn.Module):
    """A classifier with Linear layers before and after the imported module.

    The buffer ``used`` is in bfloat16. The buffer must not be cast, because the imported module writes to the
    buffer.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, config.width), nn.GELU())
        self.project = nn.Sequential(nn.Linear(config.width, config.width), nn.LayerNorm(config.width))
        imported = NearestCentres(config.width, config.centres)
        self.imported = run_in(torch.float32, keep={"used"})(imported) if config.keep_fp32 else imported
        self.name = nn.Sequential(nn.LayerNorm(config.centres), nn.Linear(config.centres, CLASSES))
        self.register_buffer("used", torch.zeros(config.centres, dtype=torch.bfloat16))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of ``images [B, 1, 8, 8]``."""
        similarities = self.imported(SIZE * self.project(self.features(images)), self.used)
        return self.name(similarities)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"fp32 module, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = Classifier(config).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
        record.add_to_curve("centres in use", float((model.used > 0).sum()))
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    record.results["centres in use"] = int((model.used > 0).sum())
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/fp32_module"))
