"""Train a compiled model, while autocast and GradScaler run in eager code.

    python -m recipes run compiled [precision=bf16] [key=value ...]

torch.compile traces the model inside the autocast region, and Inductor fuses the casts into its kernels. If
the dtype of the region changes, torch compiles the model again. The first step compiles the model, which
takes a minute on a slow machine. With ``backend=aot_eager`` the model is only traced, which is faster. At the
end the recipe prints the number of graph breaks, and the time of forward and backward relative to eager code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.progress import track
from torch._dynamo.utils import counters
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

    batch_size: int = number(64, least=1, most=TRAINING_IMAGES)  # a smaller last batch is left out
    backend: str = "inductor"
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: torch does not have this backend.
    """
    if config.backend not in torch.compiler.list_backends(exclude_tags=()):
        msg = f"backend={config.backend} is not known; torch has {', '.join(torch.compiler.list_backends())}"
        raise ConfigError(msg)
    config.start()
    counters.clear()
    record = TrainingRecord(title=f"torch.compile, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, drop_last=True)
    net = DigitsNet(config.width).to(config.device)
    model = torch.compile(net, backend=config.backend)
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate, fused=True)

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
        if len(record.losses) == 1:
            record.results["first step, compiling"] = f"{time.perf_counter() - start:.1f} s"
    record.seconds = time.perf_counter() - start
    record.results["graph breaks"] = sum(counters["graph_break"].values())

    def forward_backward(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with region:
            loss = cross_entropy(run(images), labels)
        scaler.scale(loss).backward()

    record.results["forward + backward, compiled / eager"] = (
        f"{ratio_of_times(forward_backward, model, net):.2f}"
    )
    record.test_accuracy = accuracy(net, loaders.test, region=region, device=config.device)
    return record


def ratio_of_times(
    call: Callable[[torch.nn.Module], None], *models: torch.nn.Module, rounds: int = 20
) -> float:
    """Return the median time of ``call`` with the first model, divided by its median time with the second.

    The calls with the two models alternate.
    """
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, taken in zip(models, seconds, strict=True):
            start = time.perf_counter()
            call(model)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    first, second = map(median, seconds)
    return first / second


if __name__ == "__main__":
    train(Config()).show(Path("runs/compiled"))
