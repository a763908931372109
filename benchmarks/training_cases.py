"""The training setups whose steps are timed in Lightning and Accelerate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import AdamW, Optimizer

from benchmarks.harness import Gate
from benchmarks.models import GPT, launch_bound_gpt
from benchmarks.setting import Setting

STOCK = "stock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training setup.

    Attributes:
        precision: ``"fp16"`` or ``"bf16"``.
        window: The number of micro-batches per optimizer step.
        clip: The gradient norm to which gradients are clipped, or None.
        optimizers: The number of optimizers. If ``optimizers=2``, the first optimizer updates the
            transformer blocks, and the second optimizer updates all other parameters.
        steps: The number of timed optimizer steps in a run. Before the timed steps, a third as many warm-up
            steps are taken.
    """

    name: str
    precision: str
    window: int = 1
    clip: float | None = None
    optimizers: int = 1
    fused: bool = False
    steps: int = 24

    def sized(self, setting: Setting) -> tuple[int, int]:
        """Return the number of warm-up steps and the number of timed steps."""
        return setting.sized((self.steps // 3, self.steps), (1, 1))

    def micro_batches(self, setting: Setting) -> list[torch.Tensor]:
        """Return the micro-batches of a run."""
        warm_up, steps = self.sized(setting)
        return launch_bound_gpt(setting).batches((warm_up + steps) * self.window, setting.device)

    def make_optimizers(self, model: GPT) -> list[Optimizer]:
        """Make one AdamW for all parameters, or two AdamW optimizers for two parts of the model."""
        everything = list(model.parameters())
        inner = list(model.blocks.parameters())
        within = {id(param) for param in inner}
        outer = [param for param in everything if id(param) not in within]
        parts = [everything] if self.optimizers == 1 else [inner, outer]
        return [AdamW(part, lr=1e-3, fused=self.fused) for part in parts]


NO_SLOWER = Gate(limit=1.0, against=STOCK)

CASES = (
    Case(name="bf16", precision="bf16"),
    Case(name="bf16, window of 8", precision="bf16", window=8, steps=12),
    Case(name="bf16, clipping", precision="bf16", clip=1.0),
    Case(name="fp16", precision="fp16"),
    Case(name="fp16, window of 8", precision="fp16", window=8, steps=6),
    Case(name="fp16, clipping", precision="fp16", clip=1.0),
    Case(name="fp16, fused", precision="fp16", fused=True),
    Case(name="fp16, two optimizers", precision="fp16", optimizers=2),
)


def step_clock(device: str) -> Callable[[], float]:
    """Return a clock that counts seconds of the process's CPU time, or of synchronized wall time on a GPU."""
    if device == "cpu":
        return time.process_time

    def on_cuda() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return on_cuda
