"""Train a digits classifier with Lightning in fp16, bf16 or fp32.

    python recipes/train_digits.py [precision=bf16] [key=value ...]

The only line of the program that deals with precision is ``plugins=[AmpPrecision(...)]``.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # make `recipes` importable if this file runs as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from amp_plugin import AmpMonitor, AmpPrecision
from amp_plugin.kernels.build import native_core
from recipes.config import config_errors, config_from_command_line, make_folder
from recipes.shared import (
    CLASSES,
    ConfigError,
    DigitsNet,
    DigitsProgramConfig,
    TrainingRecord,
    digits_loaders,
)


@dataclass
class DigitsConfig(DigitsProgramConfig):
    """The config of this program, which adds a key to those of ``DigitsProgramConfig``."""

    accelerator: str = "auto"


class DigitsModule(LightningModule):
    """A LightningModule that trains DigitsNet with a one-cycle learning rate schedule."""

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        self.config = config
        self.net = DigitsNet(config.width)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, a scalar."""
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Count the right answers."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW and a one-cycle learning rate schedule over all optimizer steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=self.config.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.config.learning_rate, total_steps=steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(Callback):
    """Records each optimizer step and each validation in a TrainingRecord."""

    def __init__(self, record: TrainingRecord) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Record the loss, the loss scale, and whether the step was skipped."""
        if trainer.fit_loop._should_accumulate():
            return
        plugin, loss = trainer.precision_plugin, float(outputs["loss"])
        if plugin.scaler is None:
            self.record.add_step(loss=loss, loss_scale=None, skipped=False)
        else:
            step = plugin.last_step(trainer.optimizers[0])
            self.record.add_step(loss=loss, loss_scale=step.scale_before, skipped=step.skipped)
            self.record.final_loss_scale = step.scale_after

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation accuracy."""
        self.record.add_accuracy(float(trainer.callback_metrics["accuracy"]))


def train(config: DigitsConfig, page: Path | None = None) -> TrainingRecord:
    """Train and test. Return the record of the run.

    Args:
        config: A config that was checked.
        page: The path of the HTML report of the run. If it is None, no report is written.
    """
    torch.set_num_threads(config.threads)
    seed_everything(config.seed, verbose=False)
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    record = TrainingRecord(title=f"digits, {config.precision.value}")
    module = DigitsModule(config)
    trainer = new_trainer(config, record, page)
    native_core()  # compile the native core now, so that its compilation is not timed
    start = time.perf_counter()
    trainer.fit(module, loaders.train, loaders.validation)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = trainer.test(module, loaders.test, verbose=False)[0]["accuracy"]
    return record


def new_trainer(config: DigitsConfig, record: TrainingRecord, page: Path | None = None) -> Trainer:
    """Return a Trainer with the precision plugin.

    Args:
        config: A config that was checked.
        record: The record to fill during training.
        page: The path of the HTML report of the run. If it is None, no report is written.

    Raises:
        ConfigError: This machine lacks the accelerator.
    """
    try:
        return Trainer(
            plugins=[AmpPrecision(config.precision.value, **asdict(config.loss_scale))],
            accelerator=config.accelerator,
            devices=1,
            max_epochs=config.epochs,
            accumulate_grad_batches=config.accumulate,
            gradient_clip_val=config.clip_norm,
            callbacks=[
                AmpMonitor(report=page),
                Recorder(record),
                RichProgressBar(theme=RichProgressBarTheme(metrics_format=".6g")),
            ],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
    except (ValueError, MisconfigurationException) as error:
        msg = f"accelerator={config.accelerator} is not allowed here; use auto, cpu or gpu: {error}"
        raise ConfigError(" ".join(msg.split())) from error


def main() -> None:
    """Run the recipe from the command line."""
    config = config_from_command_line(
        DigitsConfig, default="configs/train_digits.yaml", about=str(__doc__).splitlines()[0]
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no messages about missing devices
    # 2000 images in memory need no workers
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # calls from Lightning to torch
    with config_errors(Path(sys.argv[0]).name):
        folder = make_folder(config.output, f"{config.name}_{config.precision.value}")
        page = folder / "run.html"
        record = train(config, page)
    record.print_table()
    plot = folder / "training.png"
    record.save_plot(plot)
    print(f"plot: {plot}")
    print(f"page of the run: {page.resolve().as_uri()}")


if __name__ == "__main__":
    main()
