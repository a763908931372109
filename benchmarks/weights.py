"""Measure how long training with 16-bit weights takes, and how much memory each weight format needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from amp_plugin import store_weights
from amp_plugin.weights.store import weight_bytes
from benchmarks.autocast import our_region, torch_region
from benchmarks.forward_backward import BF16_MODEL, window
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.memory import peak
from benchmarks.models import compute_bound_gpt, launch_bound_gpt
from benchmarks.setting import Section, Setting

IN_A_REGION = "weights='bf16', in our autocast"
# This variant uses torch's own param.grad_dtype for float32 gradients, without amp_plugin.
FP32_GRADIENTS = "bf16 model, fp32 gradients"
WAYS = ("fp32", "bf16", "bf16-stochastic", "fp16")
# Each number is the largest allowed ratio of our time to the time of a bf16 model with bf16 gradients.
MODELS = {
    "GPT 6 x 64, launch-bound": (launch_bound_gpt, 1.05),
    "GPT, compute-bound": (compute_bound_gpt, 1.03),
}


class StoredWeights(Section):
    """Time training with 16-bit stored weights, and measure the memory that each weight format needs."""

    key = "weights"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield each model's forward and backward time, then the memory that each weight format needs."""
        for name, (make, limit) in MODELS.items():
            model = make(setting)
            batches = model.batches(1, setting.device)
            half, stored, fp32 = copy.deepcopy(model).bfloat16(), copy.deepcopy(model), model
            store_weights(stored, weights="bf16-true")
            mixed = copy.deepcopy(model)
            store_weights(mixed, weights="bf16")
            wide = copy.deepcopy(half)
            for param in wide.parameters():
                param.grad_dtype = torch.float32
            calls = {
                OURS: lambda m=stored, b=batches: window(m, b, nullcontext),
                IN_A_REGION: lambda m=mixed, b=batches: window(m, b, lambda: our_region(setting.device)),
                "torch": lambda m=fp32, b=batches: window(m, b, lambda: torch_region(setting.device)),
                BF16_MODEL: lambda m=half, b=batches: window(m, b, nullcontext),
                FP32_GRADIENTS: lambda m=wide, b=batches: window(m, b, nullcontext),
            }
            small = make is launch_bound_gpt
            yield Comparison(
                name=name,
                table="Forward + backward of one batch, weights='bf16-true' without autocast",
                samples={
                    label: setting.host_clock(call, repeat=2 if small else 1) for label, call in calls.items()
                },
                rounds=setting.rounds(51 if small else 21),
                gates=(
                    (Gate(limit=limit, against=BF16_MODEL), Gate(limit=1.02, against=FP32_GRADIENTS))
                    if setting.device == "cpu"
                    else ()
                ),
            )
        yield from self._memory(setting)

    @staticmethod
    def _memory(setting: Setting) -> Iterator[Comparison]:
        for way in WAYS:
            training = {
                label: _Training(setting, weights) for label, weights in ((OURS, way), ("fp32", "fp32"))
            }
            count = training[OURS].parameters
            for what in ("held between steps", "additional peak of a step"):
                yield Comparison(
                    name=f"weights={way!r}, {what}",
                    table="Compute-bound GPT with AdamW: bytes per parameter",
                    samples={label: _sample(run, what, setting.device) for label, run in training.items()},
                    unit="bytes",
                    rounds=1,
                    per=count,
                )


class _Training:
    """A model that has taken its first step."""

    def __init__(self, setting: Setting, weights: str) -> None:
        self.model: nn.Module = compute_bound_gpt(setting)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        store_weights(self.model, self.optimizer, weights=weights)  # type: ignore[arg-type]
        self.parameters = sum(param.numel() for param in self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param, dtype=torch.float32)
        self.optimizer.step()

    def held(self) -> float:
        """Return the number of bytes of weights, gradients and optimizer state."""
        return float(weight_bytes(self.model, self.optimizer).total)


def _sample(run: _Training, what: str, device: str):  # type: ignore[no-untyped-def]
    return run.held if what.startswith("held") else peak(run.optimizer.step, device)


SECTIONS = (StoredWeights(),)
