"""Time forward and backward passes under amp_plugin.autocast and under torch.autocast.

The models are two GPTs, a ResNet, and a GPT with 1 to 96 layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.autocast import BF16, our_region, torch_region
from benchmarks.clocks import Call
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import GPT, ResidualNet, compute_bound_gpt, launch_bound_gpt, residual_net
from benchmarks.setting import Plot, Section, Setting

BF16_MODEL = "bf16 model, no autocast"
Model = GPT | ResidualNet
Region = Callable[[], AbstractContextManager[object]]
MODELS: dict[str, Callable[[Setting], Model]] = {
    "GPT 6 x 64, launch-bound": launch_bound_gpt,
    "GPT, compute-bound": compute_bound_gpt,
    "ResNet-18 for 32 x 32 pixels": residual_net,
}


def window(model: Model, batches: Sequence[Tensor], region: Region) -> None:
    """Accumulate the gradients of several micro-batches, then zero the gradients."""
    for batch in batches:
        with region():
            loss = model(batch) / len(batches)
        loss.backward()
    model.zero_grad()


def variants(setting: Setting, model: Model) -> dict[str, Call]:
    """Return functions that run a batch under our autocast, under torch.autocast, and in a bf16 model."""
    batches = model.batches(1, setting.device)
    half = copy.deepcopy(model).bfloat16()
    half_batches = [batch.bfloat16() if batch.is_floating_point() else batch for batch in batches]

    return {
        OURS: lambda: window(model, batches, lambda: our_region(setting.device)),
        "torch": lambda: window(model, batches, lambda: torch_region(setting.device)),
        BF16_MODEL: lambda: window(half, half_batches, nullcontext),
    }


class Models(Section):
    """Time the forward and backward pass of one batch."""

    key = "models"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Time each model under amp_plugin.autocast, under torch.autocast, cast to bf16, and in fp32."""
        for name, make in MODELS.items():
            model = make(setting)
            calls = variants(setting, model)
            batches = model.batches(1, setting.device)
            calls["fp32 model"] = lambda model=model, batches=batches: window(model, batches, nullcontext)
            small = make is launch_bound_gpt
            yield Comparison(
                name=name,
                table="Forward + backward of one batch",
                samples={
                    label: setting.host_clock(call, repeat=2 if small else 1) for label, call in calls.items()
                },
                rounds=setting.rounds(51 if small else 21),
                gates=(Gate(limit=1.0),) if small and setting.device == "cpu" else (),
            )


class Depth(Section):
    """The time per op as the model grows."""

    key = "depth"
    plots = (Plot(table="per op", x_label="layers", y_label="time per op, forward + backward, {unit}"),)

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield comparisons for a launch-bound GPT with different numbers of layers."""
        for layers in setting.sized((1, 3, 6, 12, 24, 48, 96), (1, 2)):
            model = launch_bound_gpt(setting, layers)
            ops = count_ops(model)
            calls = variants(setting, model)
            yield Comparison(
                name=f"{layers} layers, {ops} ops",
                table="Launch-bound GPT of width 64: time per op",
                samples={label: setting.host_clock(call) for label, call in calls.items()},
                rounds=setting.rounds(max(9, min(51, 200 // layers))),
                per=ops,
                x=layers,
            )


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops += 1
        return func(*args, **(kwargs or {}))


def count_ops(model: Model) -> int:
    """Count the ops of a forward and backward pass under torch.autocast, including casts."""
    copied = copy.deepcopy(model).cpu()
    batches = copied.batches(1, "cpu")
    with _Counter() as counter:
        window(copied, batches, lambda: torch.autocast("cpu", BF16))
    return counter.ops


SECTIONS = (Models(), Depth())
