"""Time the ops between backward and step, and compare them with memory copies and torch's clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_plugin import GradScaler
from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.kernels.build import native_core
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import Shapes, gpt2_shapes, resnet50_shapes
from benchmarks.setting import Plot, Section, Setting

OP = torch.ops.amp_plugin
LIMIT = "limit"
SCALE = 1.0000001  # close to 1, so that gradients hardly change if they are unscaled again and again
MAX_NORM = 1e9
PROMISED_ON_CUDA = {"GPT-2 124M, fused AdamW": 1.3}
LARGE_ON_CUDA: dict[str, float | None] = {"GPT-2 774M": None, "GPT-2 1.5B": None}

SETS: dict[str, Callable[[], Shapes]] = {
    "1 x 100 MB": lambda: [(25_000_000,)],
    "ResNet-50": resnet50_shapes,
    "GPT-2 124M": gpt2_shapes,
    "GPT-2 774M": lambda: gpt2_shapes(1280, 36),
    "GPT-2 1.5B": lambda: gpt2_shapes(1600, 48),
    "1000 x 100 KB": lambda: [(25_600,)] * 1000,
    "1000 x 1 KB": lambda: [(256,)] * 1000,
    "1 x 1 GB": lambda: [(2**28,)],
}


def shapes_of(name: str, setting: Setting) -> Shapes:
    """Return the shapes of a named set of tensors. A smoke test uses three small tensors."""
    return setting.sized(SETS[name](), [(3, 4), (5,), ()])


class Gradients:
    """Parameters with gradients, their optimizer, and two scalers: amp_plugin's and torch's GradScaler."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator, device=device) * 1e-3
        self.grads = [param.grad for param in self.params]
        self.optimizer, self.their_optimizer = (
            torch.optim.AdamW(self.params, lr=1e-9, fused=True) for _ in range(2)
        )
        self.ours = GradScaler(device, init_scale=SCALE, dynamic=False)
        self.theirs = torch.amp.GradScaler(device, init_scale=SCALE)
        self.ours.register(self.optimizer)
        self.loss = torch.ones((), requires_grad=True, device=device)
        self.ours.scale(self.loss).backward()
        self.theirs.scale(self.loss)

    def scaled_again(self) -> None:
        """Make amp_plugin's GradScaler assume that the gradients are scaled, as after a backward pass."""
        self.ours.core.note_step(self.optimizer)
        self.ours.update()

    def clip_ours(self) -> None:
        """Unscale and clip in place."""
        self.ours.clip_grad_norm_(self.optimizer, MAX_NORM)

    def clip_theirs(self) -> None:
        """Unscale and clip as torch does."""
        self.theirs._per_optimizer_states.clear()
        self.theirs.unscale_(self.their_optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)

    def step_ours(self) -> None:
        """Unscale, clip, step and update with amp_plugin's GradScaler."""
        self.ours.clip_and_step(self.optimizer, MAX_NORM)
        self.ours.update()

    def step_theirs(self) -> None:
        """Unscale, clip, step and update with torch's GradScaler."""
        self.clip_theirs()
        self.theirs.step(self.their_optimizer)
        self.theirs.update()


class Kernels(Section):
    """Compare the time of each of our ops with the fastest torch op that reads or writes as many bytes."""

    key = "kernels"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield comparisons of the ops on one large tensor, then on many small tensors."""
        for name in ("1 x 100 MB",) if setting.device == "cpu" else ("1 x 1 GB", "ResNet-50", "GPT-2 124M"):
            yield from kernels(setting, name)
        yield from per_tensor(setting)
        yield norm_error(setting)


def kernels(setting: Setting, name: str) -> Iterator[Comparison]:
    """Time each op on a set of gradients, and time a torch op on one tensor of the same total size."""
    grads = [torch.randn(shape, device=setting.device) for shape in shapes_of(name, setting)]
    numel = sum(grad.numel() for grad in grads)
    flat = grads[0] if len(grads) == 1 else torch.randn(numel, device=setting.device)
    copied = torch.empty_like(flat)
    factor = torch.tensor(SCALE, device=setting.device)
    calls = {
        "norm_check / torch.sum": (lambda: OP.norm_check(grads, factor), flat.sum, 1.15),
        "norm_check / copy_": (lambda: OP.norm_check(grads, factor), lambda: copied.copy_(flat), 0.5),
        "unscale_ with norm and check / mul_": (
            lambda: OP.unscale_(grads, factor),
            lambda: flat.mul_(SCALE),
            1.1,
        ),
        "multiply_ / mul_": (lambda: OP.multiply_(grads, factor), lambda: flat.mul_(SCALE), 1.1),
    }
    for label, (ours, limit, ratio) in calls.items():
        yield Comparison(
            name=label,
            table=f"amp_plugin's ops on {name}, compared with torch's op on one tensor of the same size",
            samples={OURS: setting.memory_clock(ours), LIMIT: setting.memory_clock(limit)},
            rounds=setting.rounds(31),
            gates=(Gate(limit=ratio, against=LIMIT),) if setting.device == "cpu" else (),
        )


def per_tensor(setting: Setting) -> Iterator[Comparison]:
    """Measure how long the native core takes, per tensor, to look up and read 1000 small gradients."""
    bench = Gradients(shapes_of("1000 x 1 KB", setting), setting.device)
    native: Any = native_core().extension
    ledger, factor = native.GradientLedger, torch.tensor(SCALE, device=setting.device)
    calls = {"norm_check": ledger.norm_check, "unscale_": ledger.unscale_}
    for name, call in calls.items():
        yield Comparison(
            name=name,
            table="Looking up and reading 1000 tensors of 1 KB: time per tensor",
            samples={
                OURS: setting.memory_clock(
                    lambda call=call: call(bench.params, factor, 2.0), repeat=setting.sized(10, 1)
                )
            },
            rounds=setting.rounds(51),
            per=len(bench.params),
            gates=(Gate(limit=0.1, measure="ours", against=OURS),) if setting.device == "cpu" else (),
        )


def norm_error(setting: Setting) -> Comparison:
    """Measure the errors of amp_plugin's norm and of torch's norm, relative to the norm in float64.

    The norm is taken over many elements, so that rounding errors add up.
    """
    numel = setting.sized(100_000_000, 1000)
    grad = torch.rand(numel, device=setting.device).add_(0.5)
    right = math.sqrt(sum(part.double().square().sum().item() for part in grad.split(1_000_000)))
    unit = torch.ones((), device=setting.device)
    return Comparison(
        name=f"{numel:.0e} elements",
        table="Relative error of a norm computed in fp32",
        samples={
            OURS: lambda: abs(OP.norm_check([grad], unit)[0].item() / right - 1),
            "torch": lambda: abs(torch.nn.utils.get_total_norm([grad]).item() / right - 1),
        },
        unit="relative error",
        rounds=1,
        warm_up=0,
        gates=(Gate(limit=1e-6, measure="ours", against=OURS),),
    )


class Clipping(Section):
    """Compare the time to clip scaled gradients with that of torch's ``unscale_`` and ``clip_grad_norm_``."""

    key = "clipping"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """For each set of gradients, time our in-place clipping and torch's clipping."""
        names = ["ResNet-50", "GPT-2 124M", "1000 x 100 KB", "1000 x 1 KB"]
        for name in names if setting.device == "cpu" else [*names, *LARGE_ON_CUDA]:
            bench = Gradients(shapes_of(name, setting), setting.device)
            yield Comparison(
                name=f"{name}, in place",
                table="Unscale + check + clip",
                samples={
                    OURS: setting.memory_clock(bench.clip_ours, prepare=bench.scaled_again),
                    "torch": setting.memory_clock(bench.clip_theirs),
                },
                rounds=setting.rounds(9 if name == "GPT-2 124M" else 31),
                gates=_promised(setting, f"{name}, in place", 1.0),
            )
        if setting.device == "cpu":
            yield clip_in_the_ops(setting)


def clip_in_the_ops(setting: Setting) -> Comparison:
    """Compare the native core's overflow check on 1000 gradients with torch's unscaling and clipping."""
    bench = Gradients(shapes_of("1000 x 1 KB", setting), setting.device)
    native: Any = native_core().extension
    check, factor = native.GradientLedger.norm_check, torch.tensor(SCALE)
    repeat = setting.sized(10, 1)
    return Comparison(
        name="1000 x 1 KB, only the check",
        table="Unscale + check + clip",
        samples={
            OURS: setting.memory_clock(lambda: check(bench.params, factor, 2.0), repeat=repeat),
            "torch": setting.memory_clock(bench.clip_theirs),
        },
        rounds=setting.rounds(31),
        gates=(_speedup(50.0),),
    )


def _speedup(limit: float) -> Gate:
    return Gate(limit=limit, measure="theirs / ours")


def _promised(setting: Setting, name: str, on_cpu: float | None) -> tuple[Gate, ...]:
    limit = on_cpu if setting.device == "cpu" else PROMISED_ON_CUDA.get(name, 1.0)  # never slower than torch
    return () if limit is None else (_speedup(limit),)


class Counts(Section):
    """Measure how long unscaling and clipping take per tensor, for a growing number of tensors."""

    key = "tensors"
    threads = 0
    timing = "wall time"
    plots = (Plot(table="in place", x_label="tensors of 1 KB", y_label="time per tensor, {unit}"),)

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Compare the time that both scalers take to unscale and clip 1 to 10 000 tensors of 1 KB."""
        counts = setting.sized((1, 10, 100, 1000, 10_000), (1, 3))
        for count in counts:
            bench = Gradients([(256,)] * count, setting.device)
            yield Comparison(
                name=str(count),
                table="Unscale + check + clip of tensors of 1 KB, in place: time per tensor",
                samples={
                    OURS: setting.memory_clock(bench.clip_ours, prepare=bench.scaled_again),
                    "torch": setting.memory_clock(bench.clip_theirs),
                },
                rounds=setting.rounds(15),
                per=count,
                x=count,
            )


SECTIONS = (Kernels(), Clipping(), Counts())
