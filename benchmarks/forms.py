"""Compare the bandwidth of GPU kernels with that of ``copy_``, for several gradient and state dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.clocks import Call
from benchmarks.cuda import OP, bandwidth
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting

NUMEL = 2**27
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 128  # number of 8-bit elements that share a float32 scale
# Maps a format of optimizer states to its dtype and its bytes per element.
STATES = {
    "fp32": (torch.float32, 4.0),
    "bf16": (torch.bfloat16, 2.0),
    "8-bit": (torch.uint8, (BLOCK + 4) / BLOCK),
}
GRADIENTS = "Norm, check and scaling of 134 million elements: GB read and written per second"
ADAMW = "AdamW on 134 million elements: GB read and written per second"


class Forms(Section):
    """Measure the bandwidth of five gradient ops in three dtypes, and of AdamW in 18 dtype combinations."""

    key = "forms"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Compare each variant with ``copy_`` of one float32 tensor that has the same number of elements."""
        source = torch.randn(setting.sized(NUMEL, 2**10), device=setting.device)
        copied = torch.empty_like(source)
        copy = setting.device_clock(lambda: copied.copy_(source))

        def compared(table: str, name: str, call: Call, moved: float) -> Comparison:
            return Comparison(
                name=name,
                table=table,
                samples={
                    OURS: bandwidth(setting.device_clock(call), moved),
                    "copy_": bandwidth(copy, 2 * source.nbytes),
                },
                unit="GB/s",
                rounds=setting.rounds(33),
                gates=(Gate(limit=0.85, measure="share of theirs", against="copy_"),),
            )

        for label, dtype in DTYPES.items():
            grads = [source.to(dtype, copy=True)]
            for name, call, times in on_gradients(grads):
                yield compared(GRADIENTS, name.format(label), call, times * grads[0].nbytes)
        for label, stored, state in itertools.product(DTYPES, (False, True), STATES):
            weights = "weights stored in bf16" if stored else "fp32 weights"
            call, moved = adamw(source, DTYPES[label], state, stored=stored)
            name = f"{weights}, {label} gradients, {state} states"
            yield compared(ADAMW, name, call, moved)


def on_gradients(grads: list[Tensor]) -> Iterator[tuple[str, Call, int]]:
    """Yield an op's name, a function that calls it, and the bytes read and written per byte of gradients."""
    factor = torch.tensor(1.0000001, device=grads[0].device)
    for p in (2.0, float("inf"), 3.0):
        yield f"norm_check, {{}}, p = {p:g}", lambda p=p: OP.norm_check(grads, factor, p), 1
    yield "unscale_, {}", lambda: OP.unscale_(grads, factor), 2
    yield "multiply_, {}", lambda: OP.multiply_(grads, factor), 2


def adamw(source: Tensor, grad: torch.dtype, state: str, *, stored: bool) -> tuple[Call, float]:
    """Return an AdamW step that also unscales the gradients, and the number of bytes it reads and writes."""
    device, numel = source.device, source.numel()
    kind, size = STATES[state]
    params = [source.bfloat16() if stored else source.clone()]
    remainders = [torch.zeros(numel, dtype=torch.int16, device=device)] if stored else []
    count = int(numel * size) if kind is torch.uint8 else numel
    moments = [torch.zeros(count, dtype=kind, device=device) for _ in range(2)]
    grads, steps = [source.to(grad, copy=True)], [torch.ones((), device=device)]
    late = {"grad_scale": torch.tensor(1.1, device=device), "found_inf": torch.zeros((), device=device)}
    numbers = [1e-9, 0.9, 0.999, 1e-8, 0.0, True, False]

    def step() -> None:
        OP.step_(params, grads, moments, steps, remainders, "adam", numbers, **late)

    return step, numel * (2 * grads[0].itemsize + 8 + 4 * size)


SECTIONS = (Forms(),)
