"""Time a Trainer step of a launch-bound GPT under AmpPrecision and under the stock plugin.

    python benchmarks/lightning.py [--device cpu] [--precision fp16] [--window 1] [--runs 5]

Runs of the two are interleaved in one process; reported is the median over the runs of each run's
median step. On the CPU, with its one thread, the time is the process's own (time.process_time),
which other programs on the machine do not lengthen; on a GPU it is wall time, device work included.
The model is so small that the time goes into starting ops, not into computing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path

# As a script, this file must not be found as `lightning`.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from amp_plugin.adapters.lightning import AmpPrecision  # noqa: E402

WARM_UP = 8


class TinyGPT(LightningModule):
    """A GPT whose ops are far smaller than the cost of starting them."""

    def __init__(self, layers: int = 4, width: int = 64, length: int = 16, vocabulary: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, norm_first=True, **block) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before and itself."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepTimes(Callback):
    """Seconds of each accumulation window."""

    def __init__(self, window: int, device: str) -> None:
        self.window, self.times, self.start = window, [], 0.0
        self.clock = time.process_time if device == "cpu" else time.perf_counter

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: object, index: int
    ) -> None:
        """Start the clock at the first micro-batch of a window."""
        if index % self.window == 0:
            _synchronize(module.device)
            self.start = self.clock()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, batch: object, index: int
    ) -> None:
        """Stop it after the last, optimizer step included."""
        if (index + 1) % self.window == 0:
            _synchronize(module.device)
            self.times.append(self.clock() - self.start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plugin_of(name: str, precision: str, device: str) -> MixedPrecision:
    """Return ours, or the stock plugin with fp16 on the CPU allowed."""
    if name == "amp_plugin":
        return AmpPrecision(precision, init_scale=1024.0)
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", device)
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, init_scale=1024.0))


def seconds_of_a_step(name: str, arguments: argparse.Namespace) -> float:
    """Train once; return the median seconds of an optimizer step with its window."""
    torch.manual_seed(0)
    times = StepTimes(arguments.window, arguments.device)
    trainer = Trainer(
        plugins=[plugin_of(name, arguments.precision, arguments.device)],
        accelerator=arguments.device,
        devices=1,
        max_steps=WARM_UP + arguments.steps,
        accumulate_grad_batches=arguments.window,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    tokens = torch.randint(0, 64, (2, 16))
    data = DataLoader([tokens] * ((WARM_UP + arguments.steps) * arguments.window), batch_size=None)
    trainer.fit(TinyGPT(), data)
    return statistics.median(times.times[WARM_UP:])


def main() -> None:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--window", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="timed optimizer steps a run")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(many workers|LeafSpec).*")
    torch.set_num_threads(1)
    names = ("stock", "amp_plugin")
    medians: dict[str, list[float]] = {name: [] for name in names}
    for run in range(arguments.runs):
        for name in names if run % 2 == 0 else names[::-1]:
            medians[name].append(seconds_of_a_step(name, arguments))
    what = f"TinyGPT, {arguments.precision} on {arguments.device}, window {arguments.window}"
    title = f"{what}, torch {torch.__version__}"
    table = Table("plugin", "ms a step", "runs", title=title)
    for name in names:
        runs = " ".join(f"{1e3 * value:.2f}" for value in medians[name])
        table.add_row(name, f"{1e3 * statistics.median(medians[name]):.2f}", runs)
    ratio = statistics.median(medians["amp_plugin"]) / statistics.median(medians["stock"])
    pairs = [ours / theirs for ours, theirs in zip(medians["amp_plugin"], medians["stock"], strict=True)]
    table.add_row("ratio", f"{ratio:.3f}", " ".join(f"{value:.3f}" for value in pairs))
    Console().print(table)


if __name__ == "__main__":
    main()
