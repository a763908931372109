"""Train two models in emulated formats below 16 bits, on any machine, and compare them with bf16.

    python -m recipes run below_16_bits [key=value ...]

A classifier of handwritten digits and a character GPT train in the configured ``precision``. The classifier
and the GPT also train with Linear layers in fp8, fp8-rowwise, mxfp8 and nvfp4, and with all other ops under
bf16 autocast. All runs of a model have the same initial weights and the same batches. Emulation rounds
numbers to the values that a format can hold, so the losses show the effect of the format. The times of
emulated runs say nothing about the speed of the format on hardware.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast, convert
from recipes.shared import (
    CharGPT,
    ConfigError,
    Precision,
    RecipeConfig,
    TrainingRecord,
    digits_batches,
    digits_loaders,
    number,
)

FORMATS = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    precision: Precision = Precision.bf16
    steps: int = 60
    batch_size: int = 8
    learning_rate: float = 3e-3
    digits_batch_size: int = number(128, least=1)
    context: int = number(32, least=1)
    width: int = number(64, least=1)
    heads: int = number(4, least=1)
    layers: int = number(2, least=1)


def train(config: Config) -> TrainingRecord:
    """Train both models once in each format. Return the record of the run.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: The width is not a multiple of the number of heads, or the rows of a matrix do not fit
            the block sizes of the formats.
    """
    if config.width % config.heads:
        msg = f"width={config.width} is not allowed; it must be a multiple of heads={config.heads}"
        raise ConfigError(msg)
    if config.batch_size * config.context % 32 or config.digits_batch_size % 32:
        msg = (
            f"batch_size={config.batch_size} times context={config.context}, and "
            f"digits_batch_size={config.digits_batch_size}, must be multiples of 32, the blocks of mxfp8"
        )
        raise ConfigError(msg)
    config.start()
    record = TrainingRecord(title="formats below 16 bits, emulated", log_loss=True)
    start = time.perf_counter()
    _compare("digits", _digits_model(), lambda: _digits(config), config, record)
    text = "".join(topics[key] for key in sorted(topics))
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(character) for character in text])
    model = CharGPT(len(characters), config)
    _compare("characters", model, lambda: _windows(codes, config), config, record)
    record.seconds = time.perf_counter() - start
    return record


def _digits_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _digits(config: Config) -> Batches:
    loaders = digits_loaders(batch_size=config.digits_batch_size, seed=config.seed, drop_last=True)
    return digits_batches(loaders, steps=config.steps, device=config.device)


def _windows(codes: Tensor, config: Config) -> Batches:
    draws = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(codes) - config.context - 1, (config.batch_size, 1), generator=draws)
        windows = codes[starts + torch.arange(config.context + 1)].to(config.device)
        yield windows[:, :-1], windows[:, 1:]


def _compare(
    name: str, model: nn.Module, batches: Callable[[], Batches], config: Config, record: TrainingRecord
) -> None:
    baseline = config.precision.value
    for chosen in (baseline, *FORMATS):
        net, is_baseline = copy.deepcopy(model).to(config.device), chosen == baseline
        precision = config.precision if is_baseline else Precision.bf16
        if not is_baseline:
            convert(net, chosen, emulate=True)
        scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=precision.scaled)
        optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate)
        losses = []
        for inputs, targets in track(batches(), f"{name} in {chosen}", total=config.steps):
            with autocast(config.device, precision.dtype, enabled=precision.mixed):
                loss = cross_entropy(net(inputs).flatten(0, -2).float(), targets.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            if name == "characters" and is_baseline:  # this run is in the first plot
                record.add_scaled_step(loss, scaler, optimizer)
        record.compare(f"loss of the {name} (nats)", chosen, losses)
        last = losses[-10:]
        record.results[f"loss of the {name}, {chosen}"] = sum(last) / len(last)


if __name__ == "__main__":
    train(Config()).show(Path("runs/below_16_bits"))
