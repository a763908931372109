"""Train two models, each with its own optimizer, on joint losses with one GradScaler.

    python -m recipes run several_models [precision=bf16] [key=value ...]

Two classifiers teach each other, as in "Deep Mutual Learning" (Zhang and others, 2018). Through one joint
loss, each classifier learns from the labels and from the predictions of the other classifier. Every optimizer
steps, and then ``scaler.update`` is called once. If ``update`` ran between the two steps, torch's GradScaler
would divide the gradients of the second model by the wrong scale. amp_plugin's GradScaler remembers the loss
scale of each gradient. If the gradients of only one model overflow, only the step of that model is skipped.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from amp_plugin import GradScaler, autocast
from recipes.shared import DigitsNet, RecipeConfig, TrainingRecord, accuracy, digits_batches, digits_loaders

DISAGREEMENT = "disagreement (nats)"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    widths: list[int] = field(
        default_factory=lambda: [4, 8], metadata={"bounds": {"least": 4, "multiple_of": 4, "length": 2}}
    )


def joint_loss(first: Tensor, second: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the joint loss for two models' logits ``[B, 10]``, and the loss term for their disagreement."""
    first, second = (logits.float().log_softmax(dim=1) for logits in (first, second))
    disagreement = kl_div(first, second, log_target=True, reduction="batchmean")
    return nll_loss(first, labels) + nll_loss(second, labels) + disagreement, disagreement


def train(config: Config) -> TrainingRecord:
    """Train two digits classifiers and test them. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"several models, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    models = [DigitsNet(width).to(config.device) for width in config.widths]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), config.learning_rate, fused=True),
        torch.optim.SGD(models[1].parameters(), 30 * config.learning_rate, momentum=0.9, fused=True),
    ]

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)
    scaler.register(*optimizers)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with region:
            loss, disagreement = joint_loss(*(model(images) for model in models), labels)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizers[0])
        record.add_to_curve(DISAGREEMENT, disagreement)
    record.seconds = time.perf_counter() - start
    scores = [accuracy(model, loaders.test, region=region, device=config.device) for model in models]
    record.test_accuracy = max(scores)
    record.results["test accuracy of each"] = ", ".join(f"{score:.2%}" for score in scores)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/several_models"))
