"""Time an optimizer step with amp_plugin's scaler, with torch's GradScaler, and without a scaler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lion_pytorch
import schedulefree
import torch
from torch import Tensor

from amp_plugin import GradScaler, Spike
from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.weights.store import store_weights
from benchmarks.clocks import Sample, thread_time
from benchmarks.gradient_path import PROMISED_ON_CUDA, shapes_of
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import Shapes
from benchmarks.setting import Section, Setting, threads

BARE = "bare optimizer step"
IN_FP32 = "fp32 weights"
UNCOMPRESSED = "fp32 state"
PLAIN = "without the option"
TABLE = "Unscale + clip + step + update, after each backward pass"
TABLE_WITHOUT_SCALE = "Clip + step without a loss scale, after each backward pass"
TABLE_16_BITS = "A whole step with weights stored in bf16, compared with a step with float32 weights"
TABLE_8_BITS = "A whole step with bf16 weights and 8-bit state on one thread, compared with float32 state"
TABLE_JUDGED = "A whole step with on_spike= or log=, compared with a step without them"
TABLE_FUSED = (
    "A whole step of optimizers with a fused version in torch, compared with torch's fused and foreach steps"
)
TABLE_FOREACH = (
    "A whole step of optimizers without a fused version in torch, compared with the optimizer's own step"
)
JUDGED: dict[str, Any] = {"on_spike": Spike(), "log": lambda _: None}
"""The options of the scaler that examine each step, and their values."""
FUSED = {"Adam": 2, "AdamW": 2, "SGD with momentum": 1, "Adagrad": 1}
"""Optimizers, and the number of state tensors per parameter."""
NOT_FUSED = {
    "RMSprop with momentum": 2,
    "Adadelta": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Lion": 1,
    "AdamWScheduleFree": 2,
}
ON_THE_CPU = ("AdamWScheduleFree", "Adagrad")  # torch 2.11 has no fused Adagrad for CUDA
MATRICES = [(512, 2048)] * 4  # parameters for Muon, which spends nearly all of its time in matrix products
FOREACH = "torch, foreach"
LIMIT = "copying the same number of bytes"
MAX_NORM = 0.1
SCALE = 2.0**10
PROMISED = {
    "ResNet-50, fused AdamW": 1.65,
    "GPT-2 124M, fused AdamW": 1.65,
    "1000 x 100 KB, fused AdamW": 1.8,
    "1000 x 1 KB, fused AdamW": 5.0,
}


class MadeGradients(torch.autograd.Function):
    """A loss whose backward pass only creates a gradient for each parameter."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        """Return 0."""
        ctx.params = params
        return params[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """For each parameter, return a gradient whose elements are 1e-3 times the gradient of the loss."""
        value = grads[0].item() * 1e-3
        return tuple(torch.full_like(param, value, dtype=torch.float32) for param in ctx.params)


class Steps(Section):
    """Time optimizer steps with amp_plugin's scaler, with torch's scaler, and without a scaler."""

    key = "steps"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield comparisons for fused AdamW, then for other optimizers, then for 16-bit weights."""
        names = ("ResNet-50", "GPT-2 124M", "1000 x 100 KB", "1000 x 1 KB")
        for name in names:
            yield whole_step(setting, name, "fused AdamW")
        for name, optimizer in itertools.product(names[:2], (*FUSED, *NOT_FUSED)):
            if setting.device == "cpu" or optimizer not in ON_THE_CPU:
                yield beside_its_limit(setting, name, shapes_of(name, setting), optimizer)
        matrices = setting.sized(MATRICES, [(8, 16)])
        yield beside_its_limit(setting, "4 matrices of 512 x 2048", matrices, "Muon")
        for name, option in itertools.product(("ResNet-50", "1000 x 1 KB"), JUDGED):
            yield looked_at(setting, name, option)
        if setting.device == "cpu":
            yield in_16_bits(setting)
            yield in_8_bits(setting)
            for optimizer in ("fused AdamW", "foreach AdamW"):
                yield without_scale(setting, "ResNet-50", optimizer)


def whole_step(setting: Setting, name: str, optimizer: str) -> Comparison:
    """Time optimizer steps on a named set of parameters. Backward passes are not timed."""
    trained = Trained(shapes_of(name, setting), setting.device, optimizer)
    calls: dict[str, tuple[Callable[[], object], Any]] = {
        OURS: (trained.step_ours, trained.ours),
        "torch": (trained.step_theirs, trained.theirs),
        BARE: (trained.optimizer.step, trained.theirs),
    }
    return Comparison(
        name=f"{name}, {optimizer}",
        table=TABLE,
        samples={
            label: setting.memory_clock(call, prepare=partial(trained.backward, scaler))
            for label, (call, scaler) in calls.items()
        },
        rounds=setting.rounds(9 if name == "GPT-2 124M" else 21),
        gates=gates_of(name, optimizer, setting),
    )


def looked_at(setting: Setting, name: str, option: str) -> Comparison:
    """Time optimizer steps with and without a scaler option that examines each step, such as ``on_spike``."""
    shapes, options = shapes_of(name, setting), {option: JUDGED[option]}
    runs = {
        OURS: Trained(shapes, setting.device, "fused AdamW", options=options),
        PLAIN: Trained(shapes, setting.device, "fused AdamW"),
    }
    return Comparison(
        name=f"{name}, {option}",
        table=TABLE_JUDGED,
        samples={
            label: setting.memory_clock(run.step_ours, prepare=partial(run.backward, run.ours))
            for label, run in runs.items()
        },
        rounds=setting.rounds(21),
    )


def beside_its_limit(setting: Setting, name: str, shapes: Shapes, optimizer: str) -> Comparison:
    """Compare the time of a whole step with torch's step, and with copying as many bytes as a step must move.

    To measure the gradient norm, a step must read 4 bytes per element. To read and write the gradient, the
    parameter and each optimizer state, a step must move 8 bytes per element for each of these tensors.
    """
    best = f"fused {optimizer}" if optimizer in FUSED else optimizer
    trained = Trained(shapes, setting.device, best)
    calls: dict[str, tuple[Trained, bool]] = {OURS: (trained, True), "torch": (trained, False)}
    if optimizer in FUSED:
        calls[FOREACH] = (Trained(shapes, setting.device, f"foreach {optimizer}"), False)
    states = {**FUSED, **NOT_FUSED, "Muon": 1}[optimizer]
    moved = sum(param.numel() for param in trained.params) * (4 + 8 * (2 + states))
    samples = {
        label: setting.memory_clock(
            side.step_ours if ours else side.step_theirs,
            prepare=partial(side.backward, side.ours if ours else side.theirs),
        )
        for label, (side, ours) in calls.items()
    }
    limit = 1.5 if optimizer in FUSED else 2.0
    return Comparison(
        name=f"{name}, {optimizer}",
        table=TABLE_FUSED if optimizer in FUSED else TABLE_FOREACH,
        samples={**samples, LIMIT: copy_of(moved, setting)},
        rounds=setting.rounds(5 if name == "GPT-2 124M" else 11),
        gates=() if optimizer == "Muon" else (Gate(limit=limit, measure="theirs / ours"),),
    )


def copy_of(moved: int, setting: Setting) -> Sample:
    """Return a function that times a ``copy_`` which reads and writes ``moved`` bytes in total."""
    source = torch.zeros(setting.sized(2**26, 2**10), device=setting.device)
    target = torch.zeros_like(source)
    copy = setting.memory_clock(lambda: target.copy_(source))
    return lambda: copy() * moved / (2 * source.nbytes)


def gates_of(name: str, optimizer: str, setting: Setting) -> tuple[Gate, ...]:
    """Return the promised limits of a row."""
    row = f"{name}, {optimizer}"
    limit = (PROMISED if setting.device == "cpu" else PROMISED_ON_CUDA).get(row)
    gates = () if limit is None else (Gate(limit=limit, measure="theirs / ours"),)
    return (*gates, Gate(limit=1.15, against=BARE)) if gates and setting.device == "cpu" else gates


def in_16_bits(setting: Setting) -> Comparison:
    """Compare the time of an optimizer step for weights stored in bf16 and for float32 weights."""
    stored, wide = (
        Trained(shapes_of("ResNet-50", setting), setting.device, "fused AdamW", weights=weights)
        for weights in ("bf16-true", None)
    )
    return Comparison(
        name="ResNet-50, fused AdamW",
        table=TABLE_16_BITS,
        samples={
            OURS: setting.memory_clock(stored.step_ours, prepare=lambda: stored.backward(stored.ours)),
            IN_FP32: setting.memory_clock(wide.step_ours, prepare=lambda: wide.backward(wide.ours)),
        },
        rounds=setting.rounds(21),
        gates=(Gate(limit=1.05, against=IN_FP32),),
    )


def in_8_bits(setting: Setting) -> Comparison:
    """Time our step with 8-bit and with float32 state, and torch's step with float32 state, in one thread."""
    steps: dict[str, Sample] = {}
    for label, weights, state in (
        (OURS, "bf16-true", "8bit"),
        (UNCOMPRESSED, "bf16-true", "fp32"),
        ("torch", None, "fp32"),
    ):
        trained = Trained(
            shapes_of("1 x 100 MB", setting), setting.device, "fused AdamW", weights=weights, state=state
        )
        ours = weights is not None
        steps[label] = thread_time(
            in_one_thread(trained.step_ours if ours else trained.step_theirs),
            prepare=partial(trained.backward, trained.ours if ours else trained.theirs),
        )
    return Comparison(
        name="1 x 100 MB, fused AdamW",
        table=TABLE_8_BITS,
        samples=steps,
        rounds=setting.rounds(21),
        gates=(Gate(limit=1.1, against=UNCOMPRESSED), Gate(limit=1.7, measure="theirs / ours")),
    )


def in_one_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs ``call`` with a single torch thread."""

    def run() -> None:
        with threads(1):
            call()

    return run


def without_scale(setting: Setting, name: str, optimizer: str) -> Comparison:
    """Compare our clipping and optimizer step with torch's, without a loss scale, as in bf16 or fp32.

    The backward pass is not timed.
    """
    trained = Trained(shapes_of(name, setting), setting.device, optimizer, scaled=False)
    calls: dict[str, Callable[[], object]] = {
        OURS: trained.step_ours,
        "torch": trained.clip_and_step,
        BARE: trained.optimizer.step,
    }
    return Comparison(
        name=f"{name}, {optimizer}",
        table=TABLE_WITHOUT_SCALE,
        samples={
            label: setting.memory_clock(call, prepare=lambda: trained.backward(trained.ours))
            for label, call in calls.items()
        },
        rounds=setting.rounds(21),
    )


def optimizer_of(description: str, params: list[Tensor]) -> Any:
    """Return the optimizer that a string such as ``"fused AdamW"`` or ``"RMSprop with momentum"`` describes.

    On a GPU the step count is a GPU tensor, because the op that computes a whole step needs it there.
    """
    *kind, name = description.removesuffix(" with momentum").split()
    if name == "Lion":
        return lion_pytorch.Lion(params, lr=1e-9)
    if name == "AdamWScheduleFree":
        made = schedulefree.AdamWScheduleFree(params, lr=1e-9)
        made.train()
        return made
    options: dict[str, Any] = {"momentum": 0.9} if description.endswith(" with momentum") else {}
    if name != "Muon" and not kind:
        options |= {"foreach": True, "capturable": params[0].is_cuda}
    return getattr(torch.optim, name)(params, lr=1e-9, **dict.fromkeys(kind, True), **options)


class Trained:
    """Parameters, an optimizer that has stepped once, amp_plugin's GradScaler and torch's GradScaler."""

    def __init__(
        self,
        shapes: Shapes,
        device: str,
        optimizer: str,
        *,
        weights: Any = None,
        state: Any = "fp32",
        scaled: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.model = torch.nn.ParameterList([torch.zeros(shape, device=device) for shape in shapes])
        self.params = list(self.model)
        self.optimizer = optimizer_of(optimizer, self.params)
        if weights is not None:
            store_weights(self.model, self.optimizer, weights=weights, state=state)
        self.ours = GradScaler(device, init_scale=SCALE, dynamic=False, enabled=scaled, **(options or {}))
        self.theirs = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=10**9)
        self.backward(self.ours)
        self.step_ours()  # the first step creates the optimizer state

    def backward(self, scaler: Any) -> None:
        """Make new scaled gradients."""
        self.optimizer.zero_grad()
        scaler.scale(MadeGradients.apply(*self.params)).backward()  # type: ignore[no-untyped-call]

    def step_ours(self) -> None:
        """Unscale, clip, step and update with amp_plugin's GradScaler."""
        self.ours.clip_and_step(self.optimizer, MAX_NORM)
        self.ours.update()

    def clip_and_step(self) -> None:
        """Clip with torch's function, and step without a loss scale."""
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()

    def step_theirs(self) -> None:
        """Unscale, clip, step and update with torch's GradScaler."""
        self.theirs.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.theirs.step(self.optimizer)
        self.theirs.update()


SECTIONS = (Steps(),)
