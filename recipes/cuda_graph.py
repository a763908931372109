"""A CUDA graph runs forward, backward, optimizer step and scale update in one launch (GPU only).

    python -m recipes run cuda_graph [precision=bf16] [key=value ...]

No part of a training step makes the host wait for the GPU. The fused optimizer takes the loss scale and the
overflow flag as tensors, and the loss scale is updated on the GPU. When the graph is replayed, the optimizer
step is skipped if the gradients overflow. Before the graph is captured, a few steps on a side stream create
the gradients and the optimizer state that the graph will use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast
from recipes.shared import (
    TRAINING_IMAGES,
    ConfigError,
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

    device: str = "cuda"
    batch_size: int = number(64, least=1, most=TRAINING_IMAGES)  # a smaller last batch is left out
    warm_up: int = number(3, least=1)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: This machine has no CUDA device, or the config names another device.
    """
    _require_cuda(config)
    config.start()
    record = TrainingRecord(title=f"CUDA graph, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, drop_last=True)
    model = DigitsNet(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True, capturable=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    images = torch.zeros(config.batch_size, 1, 8, 8, device=config.device)
    labels = torch.zeros(config.batch_size, dtype=torch.int64, device=config.device)

    def load(batch: Sequence[Tensor]) -> None:
        images.copy_(batch[0])
        labels.copy_(batch[1])

    def step() -> Tensor:
        optimizer.zero_grad()
        with region:
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    batches = digits_batches(loaders, steps=config.warm_up + config.steps, device=config.device)
    graph, loss = _captured(step, load, islice(batches, config.warm_up))
    start = time.perf_counter()
    for batch in track(batches, "training", total=config.steps):
        load(batch)
        scale, skips = (scaler.get_scale(), scaler.skipped_steps()) if scaler.is_enabled() else (None, 0)
        graph.replay()
        skipped = scaler.is_enabled() and scaler.skipped_steps() > skips
        record.add_step(loss=loss.item(), loss_scale=scale, skipped=skipped)
    record.final_loss_scale = scaler.get_scale() if scaler.is_enabled() else None
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    return record


def _captured(
    step: Callable[[], Tensor], load: Callable[[Sequence[Tensor]], None], batches: Iterable[Sequence[Tensor]]
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run a few training steps on a side stream, then capture one step. Return its graph and its loss."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches:
            load(batch)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def _require_cuda(config: Config) -> None:
    if config.device != "cuda" or not torch.cuda.is_available():
        found = "finds a CUDA device" if torch.cuda.is_available() else "finds no CUDA device"
        msg = (
            f"a CUDA graph needs device=cuda and a CUDA device; given is device={config.device}, "
            f"and torch {torch.__version__} {found} here. "
            "Without one, run the same training without a graph: python -m recipes run typical_training"
        )
        raise ConfigError(msg)


if __name__ == "__main__":
    train(Config()).show(Path("runs/cuda_graph"))
