"""What a training run did, step by step: a record, its table and its plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor
    from torch.optim import Optimizer

    from amp_plugin import GradScaler


class Share(float):
    """A number in ``[0, 1]`` that tables show in per cent."""


@dataclass(kw_only=True, slots=True)
class TrainingRecord:
    """The history of one run; step ``i`` is entry ``i`` of each list.

    Attributes:
        title: heading of the table and the plot.
        losses: training loss of each optimizer step.
        loss_scales: loss scale each step was taken with; empty where nothing is scaled.
        final_loss_scale: loss scale after the last update; None where nothing is scaled.
        skipped: the steps (from 0) that overflowed and changed nothing.
        skips: how often an optimizer has skipped a step so far, as the scaler counts.
        accuracies: ``(steps done, validation accuracy in [0, 1])``.
        test_accuracy: accuracy on the test images, in [0, 1]; None where nothing is classified.
        seconds: wall time of training and validation.
        loss_label: what the loss is, with its unit.
        log_loss: draw the loss on a logarithmic axis.
        results: further rows of the table, ``{name: value}``.
        curves: further plots, ``{name with its unit: one value a step}``.
        compared: further plots of one line for each of several runs, ``{name with its unit: {run: values}}``.
        half_widths: of intervals around such lines, drawn as bands, ``{name with its unit: {run: values}}``.
        pictures: grey images, ``{file name: [rows, columns, height, width] in [0, 1]}``.
        histograms: further plots, ``{file name: (what the numbers are, numbers)}``, on a logarithmic axis.
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
            loss: the unscaled loss, 0-dim.
            scaler: what scaled it; None or a disabled one records no loss scale.
            optimizer: the one whose loss scale is drawn. The step counts as skipped if any optimizer
                has skipped one since the last call.
        """
        if scaler is None or not scaler.is_enabled():
            self.add_step(loss=loss.item(), loss_scale=None, skipped=False)
            return
        before, self.skips = self.skips, scaler.skipped_steps()
        scale = scaler.last_step(optimizer).scale_before
        self.add_step(loss=loss.item(), loss_scale=scale, skipped=self.skips > before)
        self.final_loss_scale = scaler.get_scale()

    def add_to_curve(self, name: str, value: float | Tensor) -> None:
        """Add a step's value to a further plot."""
        self.curves.setdefault(name, []).append(value if isinstance(value, float) else value.item())

    def compare(
        self, name: str, run: str, values: list[float], half_widths: list[float] | None = None
    ) -> None:
        """Add a run's values, one per step, to a further plot that compares runs, with a band around them."""
        self.compared.setdefault(name, {})[run] = values
        if half_widths is not None:
            self.half_widths.setdefault(name, {})[run] = half_widths

    def add_accuracy(self, accuracy: float) -> None:
        """Record a validation after the steps done so far."""
        self.accuracies.append((len(self.losses), accuracy))

    def print_table(self) -> None:
        """Print the result of the run."""
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
        """Return the numbers of the run, ready for JSON: None for inf and nan, which JSON has no word for."""
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

    def save(self, folder: Path) -> list[Path]:
        """Write ``result.json``, ``training.png`` and the pictures; return their paths.

        Args:
            folder: is made.
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
        """Draw loss, accuracy, loss scale and further curves over the optimizer steps.

        Args:
            path: PNG file; its folder is made.
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
            if axis.get_legend_handles_labels()[0]:  # above the panel, where it covers nothing
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
        scales = [*self.loss_scales, self.loss_scales[-1]]  # the last step ends, too
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
        widths = range(len(self.compared[name]), 0, -1)  # lines that lie on each other are all seen
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
    smallest = 1e-8  # of a decade more than fp32 resolves near 1; what is smaller is drawn there
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
        """0.3 and not 3e-01."""

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
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)  # a third of the bytes
    plt.close(figure)
