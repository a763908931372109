"""Compare the time of training steps with AmpAccelerator and with stock Accelerate.

Stock Accelerate does not support fp16 on the CPU. On the CPU, the benchmark therefore uses stock
Accelerate with torch's GradScaler and torch.autocast.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from amp_plugin.adapters.accelerate import AmpAccelerator
from amp_plugin.adapters.session import Session
from benchmarks.harness import OURS, Comparison
from benchmarks.models import launch_bound_gpt
from benchmarks.setting import Section, Setting
from benchmarks.training_cases import CASES, NO_SLOWER, STOCK, Case, step_clock


class Accelerate(Section):
    """Compare whole training steps. Each sample is the median step time of a separate training run."""

    key = "accelerate"
    timing = "CPU time of the process with one thread, median step of a run"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield each case."""
        for case in CASES:
            yield Comparison(
                name=case.name,
                table="A training step of the launch-bound GPT under Accelerate",
                samples={
                    OURS: lambda case=case: step_time(OURS, case, setting),
                    STOCK: lambda case=case: step_time(STOCK, case, setting),
                },
                rounds=setting.rounds(9),
                warm_up=0,
                gates=(NO_SLOWER,) if setting.device == "cpu" else (),
            )


def make_accelerator(label: str, case: Case, device: str) -> Accelerator:
    """Return a new accelerator: the stock one or ours."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    Session.forget_rules()
    options = {
        "mixed_precision": case.precision,
        "cpu": device == "cpu",
        "gradient_accumulation_steps": case.window,
    }
    if label == OURS:
        return AmpAccelerator(**options)
    accelerator = Accelerator(**options)
    if device == "cpu" and case.precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def step_time(label: str, case: Case, setting: Setting) -> float:
    """Train once. Return the median time of an optimizer step and its micro-batches, in microseconds."""
    torch.manual_seed(0)
    accelerator = make_accelerator(label, case, setting.device)
    gpt = launch_bound_gpt(setting)
    model, *optimizers = accelerator.prepare(gpt, *case.make_optimizers(gpt))
    batches = case.micro_batches(setting)
    clock = step_clock(setting.device)
    warm_up, steps = case.sized(setting)
    times = []
    for step in range(warm_up + steps):
        start = clock()
        for batch in batches[step * case.window : (step + 1) * case.window]:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                if case.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        times.append(clock() - start)
    Session.forget_rules()
    return 1e6 * statistics.median(times[warm_up:])


SECTIONS = (Accelerate(),)
