"""What a training run did, step by step: a record, its table and its plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(kw_only=True, slots=True)
class TrainingRecord:
    """The history of one run; step ``i`` is entry ``i`` of each list.

    Attributes:
        title: heading of the table and the plot.
        losses: training loss of each optimizer step.
        loss_scales: loss scale each step was taken with; empty where nothing is scaled.
        final_loss_scale: loss scale after the last update; None where nothing is scaled.
        skipped: the steps (from 0) that overflowed and changed nothing.
        accuracies: ``(steps done, validation accuracy in [0, 1])``.
        test_accuracy: accuracy on the test images, in [0, 1].
        seconds: wall time of training and validation.
    """

    title: str
    losses: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    final_loss_scale: float | None = None
    skipped: list[int] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    test_accuracy: float = 0.0
    seconds: float = 0.0

    def add_step(self, *, loss: float, loss_scale: float | None, skipped: bool) -> None:
        """Record one optimizer step, taken or skipped."""
        if skipped:
            self.skipped.append(len(self.losses))
        self.losses.append(loss)
        if loss_scale is not None:
            self.loss_scales.append(loss_scale)

    def add_accuracy(self, accuracy: float) -> None:
        """Record a validation after the steps done so far."""
        self.accuracies.append((len(self.losses), accuracy))

    def print_table(self) -> None:
        """Print the result of the run."""
        table = Table(title=self.title, show_header=False)
        table.add_row("test accuracy", f"{self.test_accuracy:.2%}")
        table.add_row("optimizer steps taken", str(len(self.losses) - len(self.skipped)))
        table.add_row("optimizer steps skipped", str(len(self.skipped)))
        final = "none needed" if self.final_loss_scale is None else f"{self.final_loss_scale:,.0f}"
        table.add_row("final loss scale", final)
        table.add_row("training time", f"{self.seconds:.1f} s")
        Console().print(table)

    def save_plot(self, path: Path) -> None:
        """Draw loss, accuracy and loss scale over the optimizer steps.

        Args:
            path: PNG file; its folder is made.
        """
        import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed once at the end

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415

        rows = 3 if self.loss_scales else 2
        figure, axes = plt.subplots(
            rows, 1, sharex=True, figsize=(8, 2.6 * rows), dpi=120, layout="constrained", squeeze=False
        )
        figure.suptitle(f"{self.title}: test accuracy {self.test_accuracy:.2%}")
        self._draw_loss(axes[0, 0])
        self._draw_accuracy(axes[1, 0])
        if self.loss_scales:
            self._draw_scale(axes[2, 0])
        axes[-1, 0].set_xlabel("optimizer steps")
        axes[-1, 0].set_xlim(0, len(self.losses))
        for axis in axes[:, 0]:
            axis.grid(visible=True, alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)

    def _draw_loss(self, axis: Axes) -> None:
        axis.plot(self.losses, linewidth=1, label="loss of the batch")
        axis.set_yscale("log")
        axis.set_ylabel("cross-entropy (nats)")
        self._mark_skips(axis)

    def _draw_accuracy(self, axis: Axes) -> None:
        steps, accuracies = zip(*self.accuracies, strict=True) if self.accuracies else ((), ())
        axis.plot(steps, [100 * value for value in accuracies], marker="o", markersize=3, color="tab:green")
        axis.set_ylabel("validation accuracy (%)")

    def _draw_scale(self, axis: Axes) -> None:
        axis.step(
            range(len(self.loss_scales)),
            self.loss_scales,
            where="post",
            color="tab:orange",
            label="loss scale",
        )
        axis.set_yscale("log", base=2)
        axis.set_ylabel("loss scale (factor)")
        self._mark_skips(axis)

    def _mark_skips(self, axis: Axes) -> None:
        for number, step in enumerate(self.skipped):
            label = "skipped step" if number == 0 else None
            axis.axvline(step, color="tab:red", linestyle="--", linewidth=1, alpha=0.7, label=label)
