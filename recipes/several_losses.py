"""Compare one loss scale for the sum of two losses with a separate loss scale for each loss.

    python -m recipes run several_losses [scales=per_loss] [key=value ...]

Losses of different sizes need different loss scales. At a loss scale that suits the large loss, the gradients
of the small loss underflow. The scaler converts gradients to one common loss scale before it adds them. The
layers that both losses depend on get gradients from both. If a shared gradient overflows, the scaler cannot
know which loss caused the overflow, so it lowers both loss scales.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

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


class Scales(Enum):
    """The ways to scale the two losses."""

    one = "one"
    per_loss = "per_loss"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    steps: int = 800
    learning_rate: float = 1e-2
    scales: Scales = Scales.per_loss
    drawing_weight: float = number(1e-3, above=0)
    width: int = number(64, least=1)


class TwoHeads(nn.Module):
    """A network with shared features, a head that classifies digits, and a head that reconstructs images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.name = nn.Linear(width, CLASSES)
        self.draw = nn.Linear(width, 64)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, ``[B, 10]``, and the reconstructed images, ``[B, 64]``."""
        features = self.trunk(images)
        return self.name(features), self.draw(features)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``."""
        return self.both(images)[0]


def train(config: Config) -> TrainingRecord:
    """Train on both losses and test the classifier. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"several losses, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = TwoHeads(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    names = ("naming", "drawing") if config.scales is Scales.per_loss else ()
    scaler = GradScaler(
        config.device, **asdict(config.loss_scale), enabled=config.precision.scaled, losses=names
    )
    scaler.register(optimizer)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            logits, drawings = model.both(images)
            naming = cross_entropy(logits, labels)
            drawing = config.drawing_weight * mse_loss(drawings, images.flatten(1))
        if config.scales is Scales.per_loss:
            scaler.scale(naming, name="naming").backward(retain_graph=True)
            scaler.scale(drawing, name="drawing").backward()
        else:
            scaler.scale(naming + drawing).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(naming, scaler, optimizer)
        record.add_to_curve("drawing loss (squared ink)", drawing.detach() / config.drawing_weight)
        if names and scaler.is_enabled():
            record.add_to_curve("drawing's loss scale (factor)", scaler.get_scale("drawing"))
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    if names and scaler.is_enabled():
        record.final_loss_scale = scaler.get_scale("naming")
        record.results["final loss scale of the drawing"] = f"{scaler.get_scale('drawing'):,.0f}"
    record.results["drawing loss"] = record.curves["drawing loss (squared ink)"][-1]
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/several_losses"))
