"""Time Lightning's training steps with AmpPrecision and with Lightning's own precision plugin."""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from amp_plugin.adapters.lightning import AmpPrecision
from benchmarks.harness import OURS, Comparison
from benchmarks.models import launch_bound_gpt
from benchmarks.setting import Section, Setting
from benchmarks.training_cases import CASES, NO_SLOWER, STOCK, Case, step_clock

INIT_SCALE = 1024.0


class Lightning(Section):
    """Compare whole training steps. Each sample is the median step time of a separate training run."""

    key = "lightning"
    timing = "CPU time of the process with one thread, median step of a run"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield each case."""
        for case in CASES:
            yield Comparison(
                name=case.name,
                table="A training step of the launch-bound GPT under Lightning's Trainer",
                samples={
                    OURS: lambda case=case: step_time(OURS, case, setting),
                    STOCK: lambda case=case: step_time(STOCK, case, setting),
                },
                rounds=setting.rounds(9),
                warm_up=0,
                gates=(NO_SLOWER,) if setting.device == "cpu" else (),
            )


class Learner(LightningModule):
    """A LightningModule that trains a GPT. Manual optimization is used if there are two optimizers."""

    def __init__(self, case: Case, setting: Setting) -> None:
        super().__init__()
        self.case, self.gpt = case, launch_bound_gpt(setting)
        self.automatic_optimization = case.optimizers == 1

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the loss, or, in manual optimization, step both optimizers."""
        loss = self.gpt(tokens)
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the case."""
        return self.case.make_optimizers(self.gpt)


class StepTimes(Callback):
    """Records the time of each optimizer step and its micro-batches, in seconds."""

    def __init__(self, window: int, device: str) -> None:
        self.window, self.clock = window, step_clock(device)
        self.times: list[float] = []
        self.start = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: object, index: int) -> None:
        """Start the clock at the first micro-batch of an optimizer step."""
        if index % self.window == 0:
            self.start = self.clock()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: object, batch: object, index: int
    ) -> None:
        """Stop the clock after the last micro-batch and the optimizer step."""
        if (index + 1) % self.window == 0:
            self.times.append(self.clock() - self.start)


def plugin_of(label: str, precision: str, device: str) -> MixedPrecision:
    """Return AmpPrecision, or Lightning's own precision plugin with fp16 allowed on the CPU."""
    if label == OURS:
        return AmpPrecision(precision, init_scale=INIT_SCALE)
    if precision == "bf16":
        return MixedPrecision("bf16-mixed", device)
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device, init_scale=INIT_SCALE))


def step_time(label: str, case: Case, setting: Setting) -> float:
    """Train once. Return the median time of an optimizer step and its micro-batches, in microseconds."""
    torch.manual_seed(0)
    warm_up, _ = case.sized(setting)
    times = StepTimes(case.window, setting.device)
    quiet = logging.getLogger("lightning.pytorch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(many workers|LeafSpec|pin_memory).*")
        trainer = Trainer(
            plugins=[plugin_of(label, case.precision, setting.device)],
            accelerator=setting.device,
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=case.window,
            gradient_clip_val=case.clip,
            callbacks=[times],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Learner(case, setting), DataLoader(case.micro_batches(setting), batch_size=None))
    quiet.setLevel(level)
    return 1e6 * statistics.median(times.times[warm_up:])


SECTIONS = (Lightning(),)
