"""Compare the overhead of amp_plugin.autocast and torch.autocast, per op and per region."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from amp_plugin import autocast
from amp_plugin.casting.bound_rules import ours_by_default
from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.rules_in_force import uninstall_kernels
from benchmarks.clocks import Call
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting

Context = Callable[[], AbstractContextManager[object]]

BF16 = torch.bfloat16
WITHOUT = "no autocast"
MICRO_BATCHES = 8


class Ops(Section):
    """Measure the time of ops inside and outside regions, and the time to enter and leave a region."""

    key = "ops"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Time ops that cast, ops that do not cast, ops outside regions, and the entry into a region."""
        yield from nothing_to_cast(setting)
        yield from something_to_cast(setting)
        yield from regions(setting)
        yield from core_loaded(setting)
        yield from kept_casts(setting)


def torch_region(device: str) -> AbstractContextManager[object]:
    """Open a torch.autocast region."""
    return torch.autocast(device, BF16)


def our_region(device: str) -> AbstractContextManager[object]:
    """Open an amp_plugin.autocast region."""
    return autocast(device, BF16)


def _calls(setting: Setting, dtype: torch.dtype) -> dict[str, Call]:
    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=setting.device)

    x, w, b, other = make(4, 4), make(4, 4), make(4), make(4, 4)
    images, kernel = make(1, 4, 4, 4), make(4, 4, 1, 1)
    return {
        "linear": lambda: functional.linear(x, w, b),
        "mm": lambda: torch.mm(x, w),
        "conv2d": lambda: functional.conv2d(images, kernel),
        "cat": lambda: torch.cat([x, other]),
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: functional.layer_norm(x, (4,)),
        "add, which has no op rule": lambda: x + other,
    }


def nothing_to_cast(setting: Setting) -> Iterator[Comparison]:
    """Time ops whose inputs need no cast under amp_plugin.autocast, torch.autocast and no autocast."""
    single = torch.randn(4, 4, device=setting.device)
    calls = _calls(setting, BF16)
    calls["mse_loss, fp32"] = lambda: functional.mse_loss(single, single)
    for name, call in calls.items():
        gate = Gate(limit=1.0, measure="share of max(5 %, 0.1 us)")
        yield Comparison(
            name=name,
            table="An op whose inputs need no cast",
            samples=_in_regions(setting, call, repeat=500) | _plainly(setting, call, repeat=500),
            rounds=setting.rounds(51),
            gates=(gate,) if setting.device == "cpu" else (),
        )


def something_to_cast(setting: Setting) -> Iterator[Comparison]:
    """Time ops whose fp32 inputs are cast on every call. Autocast caches only the casts of weights."""
    calls = _calls(setting, torch.float32)
    for name in ("linear", "mm", "conv2d"):
        yield Comparison(
            name=name,
            table="An op whose fp32 inputs are cast",
            samples=_in_regions(setting, calls[name], repeat=200),
            rounds=setting.rounds(51),
        )


def _in_regions(setting: Setting, call: Call, repeat: int) -> dict[str, Callable[[], float]]:
    repeat = setting.sized(repeat, 2)
    return {
        label: setting.host_clock(
            call, repeat=repeat, prepare=call, around=lambda region=region: region(setting.device)
        )
        for label, region in ((OURS, our_region), ("torch", torch_region))
    }


def _plainly(setting: Setting, call: Call, repeat: int) -> dict[str, Callable[[], float]]:
    return {WITHOUT: setting.host_clock(call, repeat=setting.sized(repeat, 2), prepare=call)}


def regions(setting: Setting) -> Iterator[Comparison]:
    """Compare the time to open and close a region, both alone and inside another region."""

    def opening(region: Callable[[str], AbstractContextManager[object]]) -> Call:
        def call() -> None:
            with region(setting.device):
                pass

        return call

    for name, around in (("enter + exit", nullcontext), ("inside another region", None)):
        samples = {
            label: setting.host_clock(
                opening(region),
                repeat=setting.sized(500, 2),
                around=around or (lambda region=region: region(setting.device)),
            )
            for label, region in ((OURS, our_region), ("torch", torch_region))
        }
        yield Comparison(
            name=name,
            table="Entering and leaving a region",
            samples=samples,
            rounds=setting.rounds(51),
            gates=(Gate(limit=0.4),) if around and setting.device == "cpu" else (),
        )


def core_loaded(setting: Setting) -> Iterator[Comparison]:
    """Time an op outside regions and in torch.autocast, with and without amp_plugin's kernels installed."""
    call = _calls(setting, BF16)["linear"]
    repeat = setting.sized(10_000, 2)
    cases = {
        "outside any region": (nullcontext, Gate(limit=1.01)),
        "inside torch.autocast": (
            lambda: torch_region(setting.device),
            Gate(limit=0.2, measure="ours - theirs"),
        ),
    }
    for name, (outer, gate) in cases.items():
        samples = {
            label: setting.host_clock(
                call,
                repeat=repeat,
                around=lambda kernels=kernels, outer=outer: _both(kernels(setting), outer()),
            )
            for label, kernels in ((OURS, installed), ("torch", uninstalled))
        }
        yield Comparison(
            name=f"linear, {name}",
            table="Ops outside amp_plugin's regions, with amp_plugin's kernels installed",
            samples=samples,
            rounds=setting.rounds(31),
            gates=(gate,) if setting.device == "cpu" else (),
        )


def kept_casts(setting: Setting) -> Iterator[Comparison]:
    """Time regions that use one weight 200 times. Only the first use in a region casts the weight."""
    for name, calls in uses_of_one_weight(setting).items():
        yield Comparison(
            name=name,
            table="A region that uses one weight 200 times",
            samples={
                label: setting.host_clock(call, repeat=1, prepare=call) for label, call in calls.items()
            },
            rounds=setting.rounds(21),
            gates=(Gate(limit=1.02),) if setting.device == "cpu" else (),
        )


def uses_of_one_weight(setting: Setting) -> dict[str, dict[str, Call]]:
    """Return functions, each of which uses one weight 200 times.

    One function enters an ``amp_plugin.autocast`` region. Two functions enter a ``torch.autocast`` region,
    one with amp_plugin's kernels and one with torch's own kernels.
    """
    weight = torch.nn.Parameter(torch.randn(512, 512, device=setting.device))
    inputs = torch.randn(4, 512, device=setting.device)
    uses = setting.sized(200, 2)

    def call(region: Callable[[str], AbstractContextManager[object]], kernels: Context) -> None:
        with kernels(), region(setting.device):
            for _ in range(uses):
                functional.linear(inputs, weight)

    ours, theirs = partial(call, our_region, nullcontext), partial(call, torch_region, nullcontext)
    under_run = partial(call, torch_region, ours_by_default)
    return {
        "amp_plugin.autocast": {OURS: ours, "torch": theirs},
        "torch.autocast under `amp-plugin run`": {OURS: under_run, "torch": theirs},
    }


@contextmanager
def uninstalled(setting: Setting) -> Iterator[None]:
    """Use torch's own autocast kernels inside this ``with`` block."""
    uninstall_kernels()
    try:
        _settle(setting)
        yield
    finally:
        KERNELS.install()


@contextmanager
def installed(setting: Setting) -> Iterator[None]:
    """Reinstall amp_plugin's kernels, so that this case does the same setup work as ``uninstalled``."""
    uninstall_kernels()
    KERNELS.install()
    _settle(setting)
    yield


def _settle(setting: Setting) -> None:
    """Run untimed ops after kernels have been installed or removed, to warm up the CPU caches."""
    x = torch.ones(4, 4, device=setting.device)
    for _ in range(setting.sized(5000, 2)):
        x.mm(x)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


SECTIONS = (Ops(),)
