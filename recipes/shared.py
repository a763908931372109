"""Provide the config keys, data, models, training records and plots that the recipes share.

From this folder, a recipe imports only this file. To use a recipe elsewhere, copy the recipe and this file
into one folder, and replace ``from recipes.shared import`` by ``from shared import``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.optim import Optimizer

    from amp_plugin import GradScaler

Config = TypeVar("Config", bound="RecipeConfig")
Result = TypeVar("Result")

# -- config keys that recipes share ----


class ConfigError(ValueError):
    """A config is not valid. The message of a ConfigError names the key and says which values are allowed."""


def number(default: float, **bounds: Any) -> Any:
    """Return a dataclass field with a default value, and with bounds that ``python -m recipes`` checks.

    Args:
        default: An int or a float.
        **bounds: Any of ``least``, ``most``, ``above``, ``below`` and ``multiple_of``, which
            ``recipes/bounds.py`` explains. If a subclass changes the default value, the bounds of the base
            class still apply.
    """
    return field(default=default, metadata={"bounds": bounds})


class Precision(Enum):
    """The precisions that a config may name."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which matrix products run."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.value]

    @property
    def mixed(self) -> bool:
        """Whether autocast is on."""
        return self is not Precision.fp32

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled. Only fp16 needs scaling, because small gradients underflow in fp16."""
        return self is Precision.fp16


@dataclass
class LossScaleConfig:
    """How the loss scale changes (fp16 only)."""

    init_scale: float = number(2.0**16, above=0, most=torch.finfo(torch.float32).max)
    growth_factor: float = number(2.0, above=1)
    backoff_factor: float = number(0.5, above=0, below=1)
    growth_interval: int = number(40, least=1)


@dataclass
class DigitsProgramConfig:
    """The config keys that ``train_digits.py`` and ``train_digits_accelerate.py`` share."""

    name: str = "digits"
    precision: Precision = Precision.fp16
    threads: int = number(1, least=1)
    seed: int = number(0, least=0, most=2**32 - 1)
    epochs: int = number(20, least=1)
    batch_size: int = number(64, least=1)
    accumulate: int = number(1, least=1)
    learning_rate: float = number(1e-2, above=0)
    weight_decay: float = number(1e-2, least=0)
    clip_norm: float = number(1.0, above=0)
    width: int = number(16, least=4, multiple_of=4)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    output: str = "runs"


@dataclass
class RecipeConfig:
    """The config keys of every recipe. The ``Config`` of a recipe adds its own."""

    precision: Precision = Precision.fp16
    device: str = "cpu"
    threads: int = number(1, least=1)
    seed: int = number(0, least=0, most=2**32 - 1)
    steps: int = number(200, least=1)
    batch_size: int = number(64, least=1)
    learning_rate: float = number(3e-3, above=0)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    output: str = "runs"

    def start(self) -> None:
        """Set the number of threads and the seed, and load the native core.

        Call this before the training is timed, because the native core may have to be compiled first.

        Raises:
            ConfigError: This machine does not have the device.
        """
        kind = self.device.partition(":")[0]
        if kind != "cpu" and not getattr(getattr(torch, kind, None), "is_available", bool)():
            found = f"torch {torch.__version__} finds no such device here"
            msg = f"device={self.device}, but {found}; use device=cpu"
            raise ConfigError(msg)
        if kind == "cuda":
            cuda_core()
        native_core()
        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)


# -- digits and a classifier -----------

CLASSES = 10
TRAINING_IMAGES = 1257  # the data set has 1797 images


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsLoaders:
    """The 1797 8x8 images of digits in scikit-learn, split 70/10/20 with equal class proportions.

    A batch is ``(images, labels)``, with fp32 images ``[B, 1, 8, 8]`` in ``[0, 1]`` and int64 labels ``[B]``.
    """

    train: DataLoader[tuple[Tensor, ...]]
    validation: DataLoader[tuple[Tensor, ...]]
    test: DataLoader[tuple[Tensor, ...]]


def digits_loaders(
    *, batch_size: int, seed: int, shift: bool = True, drop_last: bool = False
) -> DigitsLoaders:
    """Load the digits. The order of the training batches depends only on ``seed``.

    Args:
        batch_size: The images per batch. The last batch of an epoch may be smaller.
        seed: The seed that determines the split and the order of the training images.
        shift: Shift each training image at random by up to one pixel.
        drop_last: Leave out the last training batch of an epoch if it is smaller than the other batches.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(16).unsqueeze_(1)
    labels = torch.from_numpy(digits.target).long()
    rest, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    train, validation = train_test_split(rest, test_size=0.125, random_state=seed, stratify=labels[rest])

    def subset(index: list[int]) -> TensorDataset:
        return TensorDataset(images[index], labels[index])

    order = torch.Generator().manual_seed(seed)
    collate = ShiftImages(seed=seed) if shift else None
    return DigitsLoaders(
        train=DataLoader(
            subset(train),
            batch_size=batch_size,
            shuffle=True,
            generator=order,
            collate_fn=collate,
            drop_last=drop_last,
        ),
        validation=DataLoader(subset(validation), batch_size=256),
        test=DataLoader(subset(test), batch_size=256),
    )


def digits_batches(
    loaders: DigitsLoaders, *, steps: int, device: str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` training batches, and start a new epoch as often as needed.

    Args:
        loaders: The data.
        steps: The total number of batches.
        device: The device to which images and labels are moved.
    """
    epochs = chain.from_iterable(repeat(loaders.train))
    for images, labels in islice(epochs, steps):
        yield images.to(device), labels.to(device)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    *,
    region: AbstractContextManager[object] | None = None,
    device: str = "cpu",
) -> float:
    """Return the accuracy, which is the fraction of images that are classified correctly, in [0, 1].

    Args:
        model: A model that returns logits, ``[B, 10]``, for images ``[B, 1, 8, 8]``.
        loader: The images and labels.
        region: The autocast region in which the model runs. It must be reusable.
        device: The device of the model.
    """
    right = []
    for images, labels in loader:
        with region or nullcontext():
            right.append(model(images.to(device)).argmax(dim=1) == labels.to(device))
    return float(torch.cat(right).double().mean())


class ShiftImages:
    """Collates a batch, and shifts each image at random by up to one pixel horizontally and vertically.

    Args:
        seed: The seed of the moves.
    """

    def __init__(self, *, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the shifted images, ``[B, 1, 8, 8]``, and their labels, ``[B]``."""
        images, labels = (torch.stack(column) for column in zip(*examples, strict=True))
        size = images.shape[-1]
        top, left = torch.randint(0, 3, (2, len(images), 1), generator=self.generator)
        rows, columns = top + torch.arange(size), left + torch.arange(size)
        batch = torch.arange(len(images))[:, None, None]
        moved = nn.functional.pad(images, (1, 1, 1, 1))[batch, 0, rows[:, :, None], columns[:, None, :]]
        return moved.unsqueeze(1), labels


class DigitsNet(nn.Module):
    """Classifies 8x8 images with three convolutions, each with GroupNorm and ReLU, and one Linear layer.

    Args:
        width: The channels of the first convolution. The later ones have twice as many.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * width * 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of fp32 images ``[B, 1, 8, 8]``."""
        return self.classifier(self.features(images))


# -- a character GPT -------------------


class Block(nn.Module):
    """A transformer block with causal self-attention and a two-layer MLP, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, in the shape ``[B, T, width]`` of ``x``."""
        mixed = self.queries_keys_values(self.before_attention(x))
        q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.network(self.before_network(x))


class CharGPT(nn.Module):
    """Predicts the next character. ``config`` sets ``context``, ``width``, ``heads`` and ``layers``."""

    def __init__(self, characters: int, config: Any) -> None:
        super().__init__()
        self.context = config.context
        self.character = nn.Embedding(characters, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.layers)))
        self.head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, characters))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape ``[B, T, characters]``. ``text`` is an int64 tensor of shape ``[B, T]``."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.character(text) + self.position(places)))


# -- a GAN -----------------------------

PIXELS = 64


class Conditioned(nn.Module):
    """Three Linear layers that take a vector ``[B, inputs]`` and a class label ``[B]``."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.layers = nn.Sequential(
            nn.Linear(inputs + CLASSES, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return ``[B, outputs]``, fp32."""
        return self.layers(torch.cat([vectors, 4.0 * one_hot(labels, CLASSES)], dim=1)).float()


class Critic(Conditioned):
    """Scores images that are given as vectors ``[B, 64]``. Real images get high scores ``[B, 1]``."""

    def __init__(self, width: int) -> None:
        super().__init__(PIXELS, width, 1)


class Generator(Conditioned):
    """Generates images of the digits ``labels [B]`` from random noise."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__(latent, width, PIXELS)

    def forward(self, labels: Tensor) -> Tensor:  # type: ignore[override]
        """Return generated images as vectors, fp32 ``[B, 64]`` in ``[0, 1]``."""
        noise = torch.randn(len(labels), self.inputs, device=labels.device)
        return super().forward(noise, labels).sigmoid()


def between(real: Tensor, made: Tensor) -> Tensor:
    """Return a random interpolation between each real image and a generated one. The results require grad."""
    mix = torch.rand(len(real), 1, device=real.device)
    return (mix * real + (1 - mix) * made).requires_grad_()


def average_of(generator: Generator) -> AveragedModel:
    """Return a model whose weights are a running average of the generator's weights.

    The averaged model draws better digits than the generator itself.
    """
    return AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))


def draw_samples(
    generator: nn.Module, region: torch.autocast, loaders: DigitsLoaders, record: TrainingRecord
) -> None:
    """Generate ten images of each digit.

    Count the images that a nearest-neighbor classifier recognizes as the requested digit.
    """
    asked = torch.arange(CLASSES).repeat(CLASSES)
    with torch.no_grad(), region:
        samples = generator(asked.to(next(generator.parameters()).device)).cpu()
    record.pictures["samples"] = samples.view(CLASSES, CLASSES, 8, 8)
    images, labels = next(iter(loaders.test))
    read = KNeighborsClassifier(5).fit(images.flatten(1).numpy(), labels.numpy()).predict(samples.numpy())
    record.results["samples read as the digit asked for"] = Share((read == asked.numpy()).mean())


# -- the record of a run ---------------


class Share(float):
    """A number in ``[0, 1]`` that tables show as a percentage."""


@dataclass(kw_only=True, slots=True)
class TrainingRecord:
    """The history of one run. Entry ``i`` of each list belongs to optimizer step ``i``.

    Attributes:
        title: The heading of the table and of the plot.
        losses: The training loss of each optimizer step.
        loss_scales: The loss scale of each step. Empty if nothing is scaled.
        final_loss_scale: The loss scale after the last update. None if nothing is scaled.
        skipped: The indices (from 0) of the optimizer steps that were skipped because gradients overflowed.
        skips: The number of optimizer steps that the scaler has skipped so far.
        accuracies: A pair ``(number of steps done, validation accuracy in [0, 1])`` for each validation.
        test_accuracy: The accuracy on the test images, in [0, 1]. None if nothing is classified.
        seconds: The wall time of training and validation, in seconds.
        loss_label: The name of the loss, with its unit.
        log_loss: Whether the loss is drawn on a logarithmic axis.
        results: Further rows of the table, ``{name: value}``.
        curves: Maps the name of an additional plot, with its unit, to the values to plot, one per step.
        compared: Maps the name of each comparison plot to a dict, which maps the name of each run to the
            values to plot.
        half_widths: Half the width of the band around each line of ``compared``, for each step. The dict has
            the same structure as ``compared``.
        pictures: Maps a file name to a grid of gray images, ``[rows, columns, height, width]`` in [0, 1].
        histograms: Maps the file name of each histogram to the label of the logarithmic axis and the values
            to plot.
    """

    title: str
    losses: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    final_loss_scale: float | None = None
    skipped: list[int] = field(default_factory=list)
    skips: int = 0
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    test_accuracy: float | None = None
    seconds: float = 0.0
    loss_label: str = "cross-entropy (nats)"
    log_loss: bool = True
    results: dict[str, float | int | str] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    compared: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    half_widths: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    pictures: dict[str, Tensor] = field(default_factory=dict)
    histograms: dict[str, tuple[str, list[float]]] = field(default_factory=dict)

    def add_step(self, *, loss: float, loss_scale: float | None, skipped: bool) -> None:
        """Record one optimizer step, taken or skipped."""
        if skipped:
            self.skipped.append(len(self.losses))
        self.losses.append(loss)
        if loss_scale is not None:
            self.loss_scales.append(loss_scale)

    def add_scaled_step(self, loss: Tensor, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        """Record one step of a plain loop, after ``scaler.update()``.

        Args:
            loss: The unscaled loss, 0-dim.
            scaler: The scaler. If the scaler is None or disabled, no loss scale is recorded.
            optimizer: The optimizer whose loss scale is plotted. The step counts as skipped if the scaler has
                skipped any optimizer's step since the last call.
        """
        if scaler is None or not scaler.is_enabled():
            self.add_step(loss=loss.item(), loss_scale=None, skipped=False)
            return
        before, self.skips = self.skips, scaler.skipped_steps()
        scale = scaler.last_step(optimizer).scale_before
        self.add_step(loss=loss.item(), loss_scale=scale, skipped=self.skips > before)
        self.final_loss_scale = scaler.get_scale()

    def add_to_curve(self, name: str, value: float | Tensor) -> None:
        """Append the value of one step to the plot ``name``."""
        self.curves.setdefault(name, []).append(value if isinstance(value, float) else value.item())

    def compare(
        self, name: str, run: str, values: list[float], half_widths: list[float] | None = None
    ) -> None:
        """Add the values of a run, one per step, to a plot that compares several runs.

        If ``half_widths`` is given, a band of this half-width is drawn around the line.
        """
        self.compared.setdefault(name, {})[run] = values
        if half_widths is not None:
            self.half_widths.setdefault(name, {})[run] = half_widths

    def add_accuracy(self, accuracy: float) -> None:
        """Record a validation accuracy that was measured after the latest recorded step."""
        self.accuracies.append((len(self.losses), accuracy))

    def print_table(self) -> None:
        """Print the results of the run as a table."""
        table = Table(title=self.title, show_header=False)
        if self.test_accuracy is not None:
            table.add_row("test accuracy", f"{self.test_accuracy:.2%}")
        for name, value in self.results.items():
            table.add_row(name, _shown(value))
        table.add_row("optimizer steps taken", str(len(self.losses) - len(self.skipped)))
        table.add_row("optimizer steps skipped", str(len(self.skipped)))
        final = "none needed" if self.final_loss_scale is None else f"{self.final_loss_scale:,.0f}"
        table.add_row("final loss scale", final)
        table.add_row("training time", f"{self.seconds:.1f} s")
        Console().print(table)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers of the run for JSON. inf and nan become None, because JSON has neither."""
        return {
            "title": self.title,
            "test_accuracy": self.test_accuracy,
            "results": self.results,
            "losses": [_finite(loss) for loss in self.losses],
            "loss_scales": self.loss_scales,
            "final_loss_scale": self.final_loss_scale,
            "skipped": self.skipped,
            "curves": {name: [_finite(value) for value in curve] for name, curve in self.curves.items()},
            "compared": {
                name: {run: [_finite(value) for value in values] for run, values in runs.items()}
                for name, runs in self.compared.items()
            },
            "seconds": self.seconds,
        }

    def show(self, folder: Path) -> None:
        """Print the table of results, call ``save``, and print the paths of the saved files."""
        self.print_table()
        for path in self.save(folder):
            print(path)

    def save(self, folder: Path) -> list[Path]:
        """Write ``result.json`` and the images of the run. Return the paths of the files.

        Args:
            folder: The folder, which is created if needed.
        """
        self.save_plot(folder / "training.png")
        for name, images in self.pictures.items():
            _save_grid(images, folder / f"{name}.png")
        for name, (what, values) in self.histograms.items():
            _save_histogram(what, values, folder / f"{name}.png")
        (folder / "result.json").write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        return [
            folder / "result.json",
            folder / "training.png",
            *(folder / f"{name}.png" for name in (*self.pictures, *self.histograms)),
        ]

    def save_plot(self, path: Path) -> None:
        """Plot loss, accuracy, loss scale and additional curves against the optimizer steps.

        Args:
            path: The PNG file. Its folder is created if needed.
        """
        panels: list[Callable[[Axes], None]] = [self._draw_loss]
        panels += [self._draw_accuracy] if self.accuracies else []
        panels += [self._draw_scale] if self.loss_scales else []
        panels += [partial(self._draw_curve, name) for name in self.curves]
        panels += [partial(self._draw_compared, name) for name in self.compared]
        size = (8, 2.3 * len(panels) + 0.5)
        figure, axes = _figure(len(panels), 1, sharex=True, figsize=size, dpi=100, layout="constrained")
        accuracy = "" if self.test_accuracy is None else f": test accuracy {self.test_accuracy:.2%}"
        figure.suptitle(f"{self.title}{accuracy}")
        for axis, draw in zip(axes[:, 0], panels, strict=True):
            draw(axis)
            axis.grid(visible=True, alpha=0.3)
            # place the legend above the panel, so that it hides no curve
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, fontsize=9, frameon=False)
        axes[-1, 0].set_xlabel("optimizer steps")
        axes[-1, 0].set_xlim(0, max(1, len(self.losses)))
        _write(figure, path)

    def _draw_loss(self, axis: Axes) -> None:
        axis.plot(self.losses, linewidth=1, zorder=3, label="loss of the batch")
        if self.log_loss:
            _logarithmic(axis)
        axis.set_ylabel(self.loss_label)
        self._mark_skips(axis, label="skipped step")

    def _draw_accuracy(self, axis: Axes) -> None:
        steps, accuracies = zip(*self.accuracies, strict=True) if self.accuracies else ((), ())
        percent = [100 * value for value in accuracies]
        axis.plot(steps, percent, marker="o", markersize=3, color="tab:green", clip_on=False, zorder=3)
        axis.set_ylabel("validation accuracy (%)")

    def _draw_scale(self, axis: Axes) -> None:
        # Repeat the last loss scale, so that the last step is drawn with its full width.
        scales = [*self.loss_scales, self.loss_scales[-1]]
        axis.step(range(len(scales)), scales, where="post", color="tab:orange", zorder=3)
        axis.set_yscale("log", base=2)
        axis.set_ylabel("loss scale (factor)")
        self._mark_skips(axis)

    def _draw_curve(self, name: str, axis: Axes) -> None:
        axis.plot(self.curves[name], linewidth=1, color="tab:purple", zorder=3)
        if "loss scale" in name:
            axis.set_yscale("log", base=2)
        axis.set_ylabel(name)
        self._mark_skips(axis)

    def _draw_compared(self, name: str, axis: Axes) -> None:
        # Draw the widest line first, so that no line hides another.
        widths = range(len(self.compared[name]), 0, -1)
        for (run, values), width in zip(self.compared[name].items(), widths, strict=True):
            (line,) = axis.plot(values, linewidth=width, alpha=0.8, label=run)
            if half_widths := self.half_widths.get(name, {}).get(run):
                bands = [
                    (value - half, value + half) for value, half in zip(values, half_widths, strict=True)
                ]
                lower, upper = zip(*bands, strict=True)
                axis.fill_between(
                    range(len(values)), lower, upper, color=line.get_color(), alpha=0.2, linewidth=0
                )
        axis.set_ylabel(name)

    def _mark_skips(self, axis: Axes, label: str | None = None) -> None:
        for number, step in enumerate(self.skipped):
            first = label if number == 0 else None
            axis.axvline(step, color="tab:red", linewidth=0.8, alpha=0.5, zorder=1, label=first)


def _shown(value: float | str) -> str:
    if isinstance(value, Share):
        return f"{value:.2%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _save_grid(images: Tensor, path: Path) -> None:
    rows, columns = images.shape[:2]
    figure, axes = _figure(
        rows, columns, figsize=(0.48 * columns, 0.48 * rows), dpi=100, layout="constrained"
    )
    for axis, image in zip(axes.flat, images.flatten(0, 1), strict=True):
        axis.imshow(image.cpu().numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="bicubic")
        axis.set_axis_off()
    _write(figure, path)


def _save_histogram(name: str, values: list[float], path: Path) -> None:
    figure, axes = _figure(1, 1, figsize=(8, 3), dpi=100, layout="constrained")
    axis = axes[0, 0]
    smallest = 1e-8  # smaller values are drawn at 1e-8, so that zeros appear on the logarithmic axis
    decades = [smallest * 10 ** (tenth / 5) for tenth in range(41)]
    axis.hist([max(value, smallest) for value in values], bins=decades, color="tab:purple")
    axis.set_xscale("log")
    axis.set_xlabel(name)
    axis.set_ylabel("how many")
    axis.grid(visible=True, alpha=0.3)
    _write(figure, path)


def _figure(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed once at the end

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt.subplots(rows, columns, squeeze=False, **options)


def _logarithmic(axis: Axes) -> None:
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415

    axis.set_yscale("log")

    class Plain(LogFormatter):
        """Writes 0.3 and not 3e-01."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.yaxis.set_major_formatter(Plain())
    axis.yaxis.set_minor_formatter(Plain(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def _write(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.canvas.draw()
    canvas: Any = figure.canvas
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)  # saves two thirds of the bytes
    plt.close(figure)


# -- processes and messages ------------


def on_ranks(function: Callable[[Config], Result], config: Config, processes: int) -> Result:
    """Call a function in several processes, and return the result of rank 0.

    Under torchrun, no new processes are started. Each process that torchrun started then calls the function
    once and gets its own result.

    Args:
        function: The function that each process calls. The function must be defined at module level, so that
            other processes can import it.
        config: The argument of the function.
        processes: The number of processes to start. With ``processes=1``, the function runs in the current
            process. Not used under torchrun.

    Raises:
        ConfigError: More processes are requested than there are GPUs.
    """
    if "RANK" in os.environ or processes == 1:
        return function(config)
    if config.device == "cuda" and processes > (found := torch.cuda.device_count()):
        msg = f"{processes} processes need a GPU each, and this machine has {found}: set processes={found}"
        raise ConfigError(msg)
    launch = LaunchConfig(
        run_id="recipe",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="spawn",
        max_restarts=0,
    )
    return elastic_launch(launch, function)(config)[0]  # type: ignore[no-any-return]


@contextmanager
def process_group(device: str) -> Iterator[tuple[int, int]]:
    """Join a process group (gloo on the CPU, nccl on GPUs). Yield the rank and the number of ranks.

    Args:
        device: The device type of the tensors.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
        if backend == "gloo":
            dist.barrier()
            # The threads of gloo need the GIL to finish, so give them time to finish here.
            # destroy_process_group waits for gloo's threads while it holds the GIL.
            time.sleep(0.1)
    finally:
        dist.destroy_process_group()


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's messages about devices, data loader workers and deprecated calls."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for note in (".*does not have many workers.*", ".*LeafSpec.*is deprecated", ".*GPU available.*"):
            warnings.filterwarnings("ignore", message=note)
        try:
            yield
        finally:
            logger.setLevel(level)
