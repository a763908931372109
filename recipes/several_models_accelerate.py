"""With Accelerate, train two models on joint losses, each model with its own optimizer.

    python -m recipes run several_models_accelerate [precision=bf16] [key=value ...]

This is the Accelerate version of ``several_models.py``, with the same losses. Accelerate updates the loss
scale inside every ``optimizer.step()``. AmpAccelerator postpones the update until no optimizer needs the old
scale.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from amp_plugin import AmpAccelerator, AmpKwargs
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
    """Train two classifiers of handwritten digits and test them. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"several models with Accelerate, {config.precision.value}")
    accelerator = AmpAccelerator(
        mixed_precision=config.precision.value if config.precision.mixed else "no",
        cpu=config.device == "cpu",
        kwargs_handlers=[AmpKwargs(**asdict(config.loss_scale))] if config.precision.scaled else [],
    )
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    models = [accelerator.prepare(DigitsNet(width)) for width in config.widths]
    rate = config.learning_rate
    optimizers = [
        accelerator.prepare(torch.optim.AdamW(models[0].parameters(), rate, fused=True)),
        accelerator.prepare(torch.optim.SGD(models[1].parameters(), 30 * rate, momentum=0.9, fused=True)),
    ]

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=str(accelerator.device))
    for images, labels in track(batches, "training", total=config.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, disagreement = joint_loss(*(model(images) for model in models), labels)
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        record.add_scaled_step(loss, accelerator.scaler, optimizers[0].optimizer)
        record.add_to_curve(DISAGREEMENT, disagreement)
    record.seconds = time.perf_counter() - start
    scores = [accuracy(model, loaders.test, device=str(accelerator.device)) for model in models]
    accelerator.end_training()
    record.test_accuracy = max(scores)
    record.results["test accuracy of each"] = ", ".join(f"{score:.2%}" for score in scores)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/several_models_accelerate"))
