"""Compare a trained model's predictions when it runs in lower precision with its predictions in fp32.

    python -m recipes run inference [precision=bf16] [key=value ...]

Inference computes no gradients, so it needs no GradScaler. One autocast region surrounds the whole
evaluation, so each weight is cast once and not once per batch. ``torch.inference_mode`` can be opened inside
or outside of the region. Autocast runs softmax and the ops after softmax in fp32.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from amp_plugin import GradScaler, autocast
from recipes.shared import (
    DigitsNet,
    RecipeConfig,
    Share,
    TrainingRecord,
    digits_batches,
    digits_loaders,
    number,
)


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"inference, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = DigitsNet(config.width).to(config.device)
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
    record.seconds = time.perf_counter() - start

    low, low_seconds = answers(model, loaders.test, region, config.device)
    full, full_seconds = answers(model, loaders.test, nullcontext(), config.device)
    labels = torch.cat([labels for _, labels in loaders.test])
    record.test_accuracy = float((low.argmax(1) == labels).double().mean())
    record.results |= {
        "test accuracy in fp32": Share((full.argmax(1) == labels).double().mean()),
        "same answers as in fp32": Share((low.argmax(1) == full.argmax(1)).double().mean()),
        "largest difference of a probability": float((low - full).abs().max()),
        "time for the test images": f"{low_seconds * 1e3:.1f} ms, in fp32 {full_seconds * 1e3:.1f} ms",
    }
    if config.precision.mixed:
        differences = (low - full).abs().flatten().tolist()
        record.histograms["differences"] = ("difference of a probability from fp32's", differences)
    return record


def answers(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    region: AbstractContextManager[object],
    device: str,
) -> tuple[Tensor, float]:
    """Return the predicted probabilities, fp32 ``[images, 10]`` on the CPU, and the time in seconds."""
    start = time.perf_counter()
    with torch.inference_mode(), region:
        parts = [model(images.to(device)).softmax(dim=1).cpu() for images, _ in loader]
    return torch.cat(parts).float(), time.perf_counter() - start


if __name__ == "__main__":
    train(Config()).show(Path("runs/inference"))
