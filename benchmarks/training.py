"""Compare amp_plugin with torch.amp on whole training steps of GPT-2 and ResNet-50 on a GPU.

A training step consists of forward, backward, clipping and fused AdamW.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from amp_plugin import GradScaler, autocast, store_weights
from benchmarks.harness import OURS, Comparison
from benchmarks.models import GPT, GPTSize, ResNet50, launch_bound_size
from benchmarks.setting import Section, Setting

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP32 = "torch, fp32"
STEP = "A training step: forward, backward, clip, fused AdamW"
STORED = "A training step of GPT-2 124M with weights and states stored in fewer bits"
HELD = "Memory that stays allocated between training steps"
PEAK = "Peak memory of a training step"
LOSS = "Loss after five steps: difference from the fp32 loss"
COUNTED = 5  # the number of steps in which memory and losses are measured, before steps are timed
# Each entry consists of a precision, a weight format and an optimizer-state format.
# Each entry is compared with torch's training step in the same precision.
WAYS = (
    ("bf16", "bf16", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "8bit"),
    ("fp16", "fp16", "fp32"),
    ("fp16", "fp16", "bf16"),
    ("fp16", "fp16", "8bit"),
    ("fp16", "fp32", "8bit"),
)


def gpt(setting: Setting) -> nn.Module:
    """Make a model of GPT-2's size with untied embedding and output layer, for 16 x 1024 tokens."""
    size = GPTSize(layers=12, width=768, heads=12, batch=16, length=1024, words=50_304)
    torch.manual_seed(0)
    model = GPT(setting.sized(size, launch_bound_size(setting, 1)))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(setting.device)


def resnet(setting: Setting) -> nn.Module:
    """Make a ResNet-50 in the memory format channels_last, for 256 images of 224 x 224 pixels."""
    torch.manual_seed(0)
    model = ResNet50(width=setting.sized(64, 4), pixels=setting.sized(224, 32), batch=setting.sized(256, 2))
    return model.to(setting.device, memory_format=torch.channels_last)


MODELS: dict[str, Callable[[Setting], nn.Module]] = {"GPT-2 124M": gpt, "ResNet-50": resnet}


class Training:
    """A model that amp_plugin or torch trains in one precision.

    Memory and losses are measured in the first steps.

    Attributes:
        held: The bytes of device memory in use between steps, for model, optimizer and batches.
        peak: The largest number of bytes of device memory in use during a step.
        loss: The loss after ``COUNTED`` steps.
    """

    def __init__(
        self,
        setting: Setting,
        make: Callable[[Setting], nn.Module],
        precision: str,
        *,
        ours: bool,
        **stored: Any,
    ) -> None:
        before = torch.cuda.memory_allocated()
        device, dtype = setting.device, DTYPES.get(precision)
        self.model: Any = make(setting)
        torch.manual_seed(1)
        self.batches, self.ours, self.steps = self.model.batches(2, device), ours, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if stored:
            store_weights(self.model, self.optimizer, **stored)
        region = autocast if ours else torch.autocast
        self.region = (lambda: region(device, dtype=dtype)) if dtype is not None else contextlib.nullcontext
        scaler: Any = GradScaler if ours else torch.amp.GradScaler
        self.scaler = scaler(device, init_scale=2.0**12, enabled=precision == "fp16")
        for _ in range(COUNTED):
            torch.cuda.synchronize()
            self.held = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            self.loss = self.step().item()
            self.peak = torch.cuda.max_memory_allocated() - before

    def step(self) -> torch.Tensor:
        """Take a training step, and return the loss that was computed before the weights changed."""
        with self.region():
            loss: torch.Tensor = self.model(self.batches[self.steps % 2])
        self.scaler.scale(loss).backward()
        if self.ours:
            self.scaler.clip_grad_norm_(self.optimizer, max_norm=1.0)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()


class TrainingSteps(Section):
    """Compare time, memory and losses of training steps for each format of weights and optimizer state."""

    key = "training"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Compare amp_plugin with torch on both models, then on GPT-2 for each way to store its weights."""
        for name, make in MODELS.items():
            fp32 = Training(setting, make, "fp32", ours=False)
            for precision in DTYPES:
                runs = {
                    OURS: Training(setting, make, precision, ours=True),
                    "torch": Training(setting, make, precision, ours=False),
                    FP32: fp32,
                }
                yield timed(setting, f"{name}, {precision}", STEP, runs)
                yield from counted(f"{name}, {precision}", runs, fp32.loss)
        fp32 = Training(setting, gpt, "fp32", ours=False)
        theirs = {precision: Training(setting, gpt, precision, ours=False) for precision in DTYPES}
        for precision, weights, state in WAYS:
            name = f'GPT-2 124M, {precision}, weights="{weights}"'
            name += f', state="{state}"' if state != "fp32" else ""
            ours = Training(setting, gpt, precision, ours=True, weights=weights, state=state)
            runs = {OURS: ours, "torch": theirs[precision]}
            yield timed(setting, name, STORED, runs)
            yield from counted(name, runs, fp32.loss)


def timed(setting: Setting, name: str, table: str, runs: dict[str, Training]) -> Comparison:
    """Compare step times. The time of a step is the host time or the device time, whichever is longer."""
    samples = {label: setting.host_clock(run.step) for label, run in runs.items()}
    return Comparison(name=name, table=table, samples=samples, rounds=setting.rounds(21))


def counted(name: str, runs: dict[str, Training], exact: float) -> Iterator[Comparison]:
    """Yield comparisons of memory and losses, which ``Training`` has already measured."""
    pair = {label: runs[label] for label in (OURS, "torch")}
    for table, unit, counts in (
        (HELD, "bytes", {label: run.held for label, run in pair.items()}),
        (PEAK, "bytes", {label: run.peak for label, run in pair.items()}),
        (LOSS, "relative error", {label: abs(run.loss / exact - 1) for label, run in pair.items()}),
    ):
        samples = {label: lambda value=value: float(value) for label, value in counts.items()}
        yield Comparison(name=name, table=table, samples=samples, unit=unit, rounds=1, warm_up=0)


SECTIONS = (TrainingSteps(),)
