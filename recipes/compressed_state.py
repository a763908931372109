"""Compare training losses with Adam's moments stored in 32, 16 and 8 bits.

    python -m recipes run compressed_state [precision=fp16] [key=value ...]

``store_weights(..., state=...)`` stores an optimizer's moments in fewer bits between its steps. The weights
stay exact. For each seed, the same classifier trains with each state format on the same batches, so only the
format can change the losses. The bands in the plots and the numbers after ± are 95 % confidence intervals of
the mean over the seeds (Student's t). If ``precision`` is bf16, the weights are also stored in 16 bits.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from scipy.stats import t as student_t
from torch import Tensor
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast, store_weights
from amp_plugin.weights.store import weight_bytes
from recipes.shared import (
    DigitsNet,
    Precision,
    RecipeConfig,
    TrainingRecord,
    digits_batches,
    digits_loaders,
    number,
)

STATES = ("fp32", "bf16", "8bit")
FINAL_STEPS = 20  # the final loss is the mean loss of the last 20 steps


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    precision: Precision = Precision.bf16
    steps: int = number(150, least=1)
    seeds: int = number(5, least=2)
    width: int = number(8, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a classifier with each state format and each seed. Return the losses and their differences.

    Args:
        config: A config that was checked. The returned TrainingRecord shows the steps of the run with the
            first seed and 8-bit state.
    """
    config.start()
    record = TrainingRecord(title=f"compressed state, {config.precision.value}")
    start = time.perf_counter()
    losses: dict[str, list[list[float]]] = {state: [] for state in STATES}
    for seed in track(range(config.seed, config.seed + config.seeds), "seeds"):
        for state in STATES:
            of_this_run = TrainingRecord(title=state)
            held = _train(config, state, seed, of_this_run)
            losses[state].append(of_this_run.losses)
            if seed == config.seed:
                record.results[f"bytes per parameter, state={state}"] = held
                last = of_this_run
    record.losses, record.skipped = last.losses, last.skipped
    record.loss_scales, record.final_loss_scale = last.loss_scales, last.final_loss_scale
    record.seconds = time.perf_counter() - start
    _compare({state: torch.tensor(runs).double() for state, runs in losses.items()}, record)
    return record


def _train(config: Config, state: str, seed: int, record: TrainingRecord) -> float:
    """Train one classifier into a record. Return the bytes per parameter."""
    torch.manual_seed(seed)
    loaders = digits_loaders(batch_size=config.batch_size, seed=seed)
    model = DigitsNet(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)
    weights = "bf16" if config.precision is Precision.bf16 else "fp32"
    store_weights(model, optimizer, weights=weights, state=state)  # type: ignore[arg-type]
    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    for images, labels in digits_batches(loaders, steps=config.steps, device=config.device):
        optimizer.zero_grad()
        with region:
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
    return weight_bytes(model, optimizer).per_parameter()["total"]


def _compare(losses: dict[str, Tensor], record: TrainingRecord) -> None:
    """Record how the losses ``[seeds, steps]`` of each state format differ from those with fp32 state."""
    exact = losses["fp32"]
    record.results["final loss, state=fp32"] = exact[:, -FINAL_STEPS:].mean().item()
    record.results["its standard deviation"] = exact[:, -FINAL_STEPS:].mean(1).std().item()
    for state, runs in losses.items():
        mean, half_width = _mean_and_interval(runs - exact)
        record.compare("loss less that of fp32 state (nats)", state, mean.tolist(), half_width.tolist())
        if state != "fp32":
            mean, half_width = _mean_and_interval((runs - exact)[:, -FINAL_STEPS:].mean(1))
            record.results[f"final loss, state={state}, less fp32's"] = f"{mean:+.5f} ± {half_width:.5f}"


def _mean_and_interval(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the first dimension, and half the width of the mean's 95 % confidence interval."""
    count = len(values)
    return values.mean(0), values.std(0) * float(student_t.ppf(0.975, count - 1)) / count**0.5


if __name__ == "__main__":
    train(Config()).show(Path("runs/compressed_state"))
