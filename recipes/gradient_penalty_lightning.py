"""In Lightning, add a gradient penalty that the precision plugin computes from the scaled loss.

    python -m recipes run gradient_penalty_lightning [precision=bf16] [key=value ...]

This is the Lightning version of ``gradient_penalty.py``, with the same losses. Lightning runs
``training_step`` in an autocast region. ``precision_plugin.gradient_penalty`` turns autocast off while it
computes the penalty. The returned penalty is not scaled, and is added to the loss like any other term.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor
from torch.nn.functional import cross_entropy

from amp_plugin import AmpPrecision
from recipes.shared import (
    DigitsNet,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_loaders,
    number,
    quiet_lightning,
)

PENALTY = "penalty (squared norm)"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    weight: float = number(0.1, least=0)
    width: int = number(8, least=4, multiple_of=4)


class Penalised(LightningModule):
    """DigitsNet with cross-entropy and a penalty on its gradients with respect to the images."""

    def __init__(self, config: Config, record: TrainingRecord) -> None:
        super().__init__()
        self.config, self.record = config, record
        self.net = DigitsNet(config.width)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss to minimize, and the two terms that add up to it."""
        images, labels = batch
        images.requires_grad_()
        naming = cross_entropy(self.net(images), labels)
        precision = self.trainer.precision_plugin
        penalty = precision.gradient_penalty(naming * len(images), images) / len(images)
        return {"loss": naming + self.config.weight * penalty, "naming": naming, "penalty": penalty}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), self.config.learning_rate, fused=True)

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: Any) -> None:
        """Record the step."""
        scaler, (optimizer,) = self.trainer.precision_plugin.scaler, self.trainer.optimizers
        self.record.add_scaled_step(outputs["naming"], scaler, optimizer)
        self.record.add_to_curve(PENALTY, outputs["penalty"])


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"gradient penalty in Lightning, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    module = Penalised(config, record)
    with quiet_lightning():
        trainer = Trainer(
            plugins=[AmpPrecision(config.precision.value, **asdict(config.loss_scale))],
            accelerator=config.device,
            devices=1,
            max_steps=config.steps,
            callbacks=[RichProgressBar()],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(module, loaders.train)
        record.seconds = time.perf_counter() - start
    region = trainer.precision_plugin.autocast_context_manager()
    record.test_accuracy = accuracy(
        module.net.to(config.device), loaders.test, region=region, device=config.device
    )
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/gradient_penalty_lightning"))
