"""Benchmarks that need a GPU, for kernel correctness, bandwidth, kernel launches and host syncs."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.kernels.cuda.register import cuda_core
from benchmarks.clocks import Call, Sample
from benchmarks.gradient_path import SETS, Gradients, shapes_of
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting

OP = torch.ops.amp_plugin
SCALE = 2.0**10


def prepare() -> None:
    """Compile the CUDA kernels for this GPU and check their results.

    Raises:
        RuntimeError: There is no GPU, or the kernels cannot run on this GPU.
        ArithmeticError: A kernel computes a wrong result.
    """
    core = cuda_core()
    if not core.loaded:
        msg = f"the benchmarks for CUDA need a GPU that runs the kernels: {core.reason}"
        raise RuntimeError(msg)
    from amp_plugin.kernels.cuda.compile import build_ahead  # noqa: PLC0415 - needs cuda-core

    major, minor = torch.cuda.get_device_capability()
    build_ahead([f"sm_{major}{minor}"])
    for name in ("ResNet-50", "1000 x 1 KB"):
        check([torch.randn(shape, device="cuda") for shape in SETS[name]()])


def check(grads: Sequence[Tensor]) -> None:
    """Run the kernels on fp32 gradients, and compare the results with float64 and with torch's own ops.

    Raises:
        ArithmeticError: The results differ.
    """
    inverse = torch.tensor(1 / SCALE, device=grads[0].device)
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in grads)) / SCALE
    mine = [grad.clone() for grad in grads]
    for norm, found, flags in (OP.norm_check(mine, inverse), OP.unscale_(mine, inverse)):
        if abs(norm.item() / exact - 1) > 1e-6 or found.item() != 0 or bool(flags.any()):
            msg = f"the norm is {norm.item()}, exactly {exact}; found_inf is {found.item()}"
            raise ArithmeticError(msg)
    OP.multiply_(mine, torch.tensor(SCALE, device=grads[0].device))
    for unscaled, grad in zip(mine, grads, strict=True):
        if not torch.equal(unscaled, grad):
            msg = "unscale_ or multiply_ wrote wrong numbers"
            raise ArithmeticError(msg)


def launches(call: Call) -> int:
    """Count the kernels, copies and memsets that one call launches."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # The profiler also reports torch's annotation of an optimizer step, which is not a launch.
    return sum(not event.is_user_annotation for event in on_device)


def waits(call: Call) -> int:
    """Count how often one call makes the host wait for the device."""
    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


class Bandwidth(Section):
    """Measure the memory bandwidth of each op on the GPU, excluding host time."""

    key = "bandwidth"
    threads = 0
    timing = "wall time"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Compare the bandwidth of each op with that of ``copy_``, for several sets of gradients."""
        for name in ("1 x 100 MB", "ResNet-50", "GPT-2 124M", "1 x 1 GB"):
            yield from bandwidths(setting, name)


def bandwidths(setting: Setting, name: str) -> Iterator[Comparison]:
    """Yield one comparison per op, for the named set of gradients."""
    grads = [torch.randn(shape, device=setting.device) for shape in shapes_of(name, setting)]
    flat = torch.randn(sum(grad.numel() for grad in grads), device=setting.device)
    copied = torch.empty_like(flat)
    copy = setting.device_clock(lambda: copied.copy_(flat))
    for label, (call, of_torch, times) in {**gradient_calls(grads), **step_calls(grads)}.items():
        samples = {
            OURS: bandwidth(setting.device_clock(call), times * flat.nbytes),
            "copy_": bandwidth(copy, 2 * flat.nbytes),
        }
        if of_torch is not None:
            samples["torch"] = bandwidth(setting.device_clock(of_torch), times * flat.nbytes)
        yield Comparison(
            name=label,
            table=f"Bandwidth on {name}: GB read and written per second",
            samples=samples,
            unit="GB/s",
            rounds=setting.rounds(61),
            gates=(Gate(limit=0.85, measure="share of theirs", against="copy_"),),
        )


Calls = dict[str, tuple[Call, Call | None, float]]
"""By name: our op, torch's op for the same work, and the bytes they move divided by the gradients' bytes."""


def gradient_calls(grads: list[Tensor]) -> Calls:
    """Return functions that call our gradient ops, and our ops that pack and unpack stored weights."""
    half = [torch.empty_like(grad, dtype=torch.bfloat16) for grad in grads]
    low = [torch.empty_like(grad, dtype=torch.int16) for grad in grads]
    factor = torch.tensor(1.0000001, device=grads[0].device)
    return {
        "norm_check": (lambda: OP.norm_check(grads, factor), None, 1),
        "unscale_": (lambda: OP.unscale_(grads, factor), None, 2),
        "multiply_": (lambda: OP.multiply_(grads, factor), None, 2),
        "pack_weights_": (lambda: OP.pack_weights_(grads, half, low), None, 2),
        "unpack_weights_": (lambda: OP.unpack_weights_(half, low, grads), None, 2),
    }


def step_calls(grads: list[Tensor]) -> Calls:
    """Return our AdamW and SGD steps, which also unscale the gradients, and torch's fused steps."""
    device = grads[0].device
    params, first, second = ([torch.rand_like(grad) for grad in grads] for _ in range(3))
    steps = [torch.ones((), device=device) for _ in grads]
    late = {"grad_scale": torch.tensor(1.0000001, device=device), "found_inf": torch.zeros((), device=device)}
    adam = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
    sgd = {"lr": 1e-9, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    sgd["maximize"] = False
    moments, of_adam = [*first, *second], [*list(adam.values())[:5], True, False]
    return {
        "AdamW": (
            lambda: OP.step_(params, grads, moments, steps, [], "adam", of_adam, **late),
            lambda: torch._fused_adamw_(
                params, grads, first, second, [], steps, amsgrad=False, **adam, **late
            ),
            8,
        ),
        "SGD": (
            lambda: OP.step_(params, grads, first, [], [], "sgd_momentum", [*sgd.values()], **late),
            lambda: torch._fused_sgd_(params, grads, first, is_first_step=False, **sgd, **late),
            6,
        ),
    }


def shares(setting: Setting, name: str) -> dict[str, dict[str, float]]:
    """Return the bandwidths of our op and torch's op, in GB/s and relative to ``copy_``."""
    found = {}
    for comparison in bandwidths(setting, name):
        rates = {
            label: statistics.median(sample() for _ in range(setting.sized(5, 1)))
            for label, sample in comparison.samples.items()
        }
        copy = rates["copy_"]
        found[comparison.name] = {"GB/s": rates[OURS], "share": rates[OURS] / copy}
        if "torch" in rates:
            found[comparison.name]["torch's share"] = rates["torch"] / copy
    return found


def bandwidth(sample: Sample, moved: float) -> Sample:
    """Convert a time in microseconds to GB/s. ``moved`` is the number of bytes read and written."""
    return lambda: moved / max(sample(), 1e-9) / 1e3


class Launches(Section):
    """Count the kernel launches and host syncs of clipping and of a whole optimizer step."""

    key = "launches"
    timing = "counted by torch's profiler and its sync debug mode"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield the counts of launches and of host syncs for several sets of gradients."""
        for name in ("ResNet-50", "GPT-2 124M", "1000 x 1 KB"):
            bench = Gradients(shapes_of(name, setting), setting.device)
            for what, ours, theirs, most in (
                ("clip, in place", lambda bench=bench: clip_after_update(bench), bench.clip_theirs, None),
                ("clip + fused AdamW", bench.step_ours, bench.step_theirs, None),
            ):
                for unit, count, limit in (("launches", launches, most), ("waits", waits, 0)):
                    calls = {OURS: ours, "torch": theirs}
                    yield Comparison(
                        name=f"{name}, {what}",
                        table=f"Unscale + check + clip: {unit}",
                        samples={
                            label: lambda call=call, count=count: float(count(call))
                            for label, call in calls.items()
                        },
                        unit=unit,
                        rounds=1,
                        warm_up=0,
                        gates=() if limit is None else (Gate(limit=limit, measure="ours", against=OURS),),
                    )


def clip_after_update(bench: Gradients) -> None:
    """Unscale and clip as in the first step after a change of the loss scale."""
    bench.ours.loss_scale.generation += 1
    bench.scaled_again()
    bench.clip_ours()


SECTIONS = (Bandwidth(), Launches())
