"""Worker threads, such as those of DataParallel, run in the autocast region of the main thread.

    python -m recipes run threads [precision=bf16] [key=value ...]

A new thread starts with autocast off. ``autocast_module`` records the autocast state of the thread that calls
it. Every thread that runs the module uses the recorded autocast state. The threads may be worker threads of a
pool, as in this recipe, or the threads of ``nn.DataParallel``. Without ``autocast_module``, DataParallel
passes to its threads whether autocast is enabled, but not the dtype or the op rules.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast, autocast_module
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

    workers: int = number(2, least=1)
    width: int = number(8, least=4, multiple_of=4)


class InThreads(nn.Module):
    """Splits a batch and runs the module on each part in a separate thread, as DataParallel does on GPUs."""

    def __init__(self, module: nn.Module, workers: int) -> None:
        super().__init__()
        self.module = module
        self.workers = workers
        self.pool = ThreadPoolExecutor(workers)

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of the module for all ``images``, in the order of the images."""
        grad_enabled = torch.is_grad_enabled()  # new threads do not inherit the grad mode

        def run_part(part: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad_enabled):
                return self.module(part)

        return torch.cat(list(self.pool.map(run_part, images.chunk(self.workers))))


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"threads, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    net = DigitsNet(config.width).to(config.device)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)
    with region:
        net = autocast_module(net)
    model = nn.DataParallel(net) if config.device == "cuda" else InThreads(net, config.workers)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            logits = model(images)
            loss = cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    record.results["dtype of the threads' logits"] = str(logits.dtype)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/threads"))
