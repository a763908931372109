"""Train a digits classifier with Accelerate in fp16, bf16 or fp32.

    accelerate launch --config_file configs/accelerate/cpu_fp16.yaml recipes/train_digits_accelerate.py
    python recipes/train_digits_accelerate.py precision=fp16

The recipe has the same model, data and losses as ``train_digits.py``. The only lines that deal with precision
are those that import and construct AmpAccelerator.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # make `recipes` importable if this file runs as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from amp_plugin import AmpAccelerator, AmpKwargs
from amp_plugin.kernels.build import native_core
from recipes.config import config_errors, config_from_command_line, make_folder
from recipes.shared import ConfigError, DigitsNet, DigitsProgramConfig, TrainingRecord, digits_loaders


@dataclass
class DigitsConfig(DigitsProgramConfig):
    """The config of this program, which changes two defaults of ``DigitsProgramConfig``."""

    name: str = "digits_accelerate"
    precision: str | None = None  # None means the precision that the launch file sets


def train(config: DigitsConfig) -> TrainingRecord:
    """Train and test. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    torch.set_num_threads(config.threads)
    accelerator = new_accelerator(config)
    set_seed(config.seed)
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = DigitsNet(config.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=config.weight_decay)
    steps = config.epochs * -(-len(loaders.train) // config.accumulate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps)
    model, optimizer, schedule, train_loader, validation, test = accelerator.prepare(
        model, optimizer, schedule, loaders.train, loaders.validation, loaders.test
    )
    record = TrainingRecord(title=f"digits, {accelerator.mixed_precision} x {accelerator.num_processes}")
    native_core()  # compile the native core now, so that its compilation is not timed
    start = time.perf_counter()
    for _ in range(config.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                result = accelerator.last_step(optimizer)
                record.add_step(
                    loss=float(accelerator.gather(loss.detach()).mean()),
                    loss_scale=None if accelerator.scaler is None else result.scale_before,
                    skipped=result.skipped,
                )
        record.add_accuracy(accuracy(accelerator, model, validation))
    record.seconds = time.perf_counter() - start
    record.final_loss_scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    record.test_accuracy = accuracy(accelerator, model, test)
    accelerator.end_training()
    return record


def new_accelerator(config: DigitsConfig) -> AmpAccelerator:
    """Return an Accelerator with the precision that the config or the launch file sets.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: There is no precision with this name.
    """
    try:
        return AmpAccelerator(
            mixed_precision=config.precision,
            gradient_accumulation_steps=config.accumulate,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            kwargs_handlers=[AmpKwargs(**asdict(config.loss_scale))],
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


@torch.no_grad()
def accuracy(accelerator: AmpAccelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the accuracy over all processes, in [0, 1].

    Args:
        accelerator: The accelerator that prepared the model.
        model: A model that returns logits, ``[B, 10]``.
        loader: A prepared DataLoader of images ``[B, 1, 8, 8]`` and labels ``[B]``.
    """
    model.eval()
    right = [
        accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels) for images, labels in loader
    ]
    return float(torch.cat(right).double().mean())


def main() -> None:
    """Run the recipe from the command line."""
    config = config_from_command_line(
        DigitsConfig, default="configs/accelerate/digits.yaml", about=str(__doc__).splitlines()[0]
    )
    with config_errors(Path(sys.argv[0]).name):
        folder = make_folder(config.output, config.name)
        record = train(config)
    if not AmpAccelerator().is_main_process:
        return
    record.print_table()
    plot = folder / "training.png"
    record.save_plot(plot)
    print(f"plot: {plot}")


if __name__ == "__main__":
    main()
