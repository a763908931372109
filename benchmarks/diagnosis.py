"""Measure the time that diagnose adds to ops, and the time that a run report adds to training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from amp_plugin import GradScaler, diagnose, report, shadow_run
from amp_plugin.numerics import first_module
from amp_plugin.numerics.first_module import ModuleWatch
from benchmarks.autocast import our_region
from benchmarks.clocks import Call
from benchmarks.forward_backward import window
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import GPT, compute_bound_gpt, launch_bound_gpt
from benchmarks.setting import Section, Setting

WITHOUT = "no block"
NOT_DRAWN = "no report"
HOOKED = "hooks on modules"


class Diagnosis(Section):
    """Measure the time that a diagnose block adds to ops, and the time that a run report adds to steps."""

    key = "diagnosis"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Time training code with and without a diagnose block, and with and without a run report."""
        yield not_armed(setting)
        for name, make in (
            ("GPT 6 x 64, launch-bound", launch_bound_gpt),
            ("GPT, compute-bound", compute_bound_gpt),
        ):
            model = make(setting)
            batches = model.batches(1, setting.device)
            step = lambda model=model, batches=batches: window(  # noqa: E731 - one per model
                model, batches, lambda: our_region(setting.device)
            )
            yield armed(setting, name, step)
            with TemporaryDirectory() as folder:
                yield from drawn(setting, name, make, folder)


def not_armed(setting: Setting) -> Comparison:
    """Compare the time of an op before and after a ``with diagnose()`` block."""
    x = torch.randn(4, 4, device=setting.device)

    def opened_and_closed() -> None:
        with diagnose():
            x.add(x)

    repeat = setting.sized(5000, 2)
    return Comparison(
        name="add, 4 x 4",
        table="An op outside diagnose blocks",
        samples={
            OURS: setting.host_clock(lambda: x.add(x), repeat=repeat, prepare=opened_and_closed),
            WITHOUT: setting.host_clock(lambda: x.add(x), repeat=repeat),
        },
        rounds=setting.rounds(21),
        gates=(Gate(limit=1.0, against=WITHOUT),) if setting.device == "cpu" else (),
    )


def armed(setting: Setting, name: str, step: Call) -> Comparison:
    """Compare the time of forward and backward inside diagnose, inside shadow_run, and outside of both."""
    regions: dict[str, type[AbstractContextManager[object]] | object] = {
        "diagnose": diagnose,
        "shadow_run": shadow_run,
        WITHOUT: nullcontext,
    }
    return Comparison(
        name=name,
        table="Forward + backward of one batch inside diagnose or shadow_run",
        samples={
            label: setting.host_clock(step, prepare=step, around=region)  # type: ignore[arg-type]
            for label, region in regions.items()
        },
        rounds=setting.rounds(5),
    )


def drawn(setting: Setting, name: str, make: Callable[[Setting], GPT], folder: str) -> Iterator[Comparison]:
    """Compare the time of training steps that update an HTML report with that of steps without a report."""

    def step_of(model: GPT, scaler: GradScaler) -> Call:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        (batch,) = model.batches(1, setting.device)

        def step(factor: float = 1.0) -> None:
            with our_region(setting.device):
                loss = model(batch)
            scaler.scale(loss if factor == 1.0 else loss * factor).backward()
            scaler.clip_and_step(optimizer, 1.0)
            optimizer.zero_grad()

        return step

    plain, model, hooked = (make(setting) for _ in range(3))
    scaler, hooked_scaler = (GradScaler(setting.device, enabled=False) for _ in range(2))
    always_on = patch.multiple(first_module, STEPS_AFTER_SKIP=10**9, STEPS_IN_ALL=10**9)
    with (
        always_on,
        report(scaler, model, f"{folder}/run.html"),
        ModuleWatch(hooked_scaler.core.log, [hooked]),
    ):
        hooked_step = step_of(hooked, hooked_scaler)
        hooked_step(math.nan)  # the first skipped step registers the hooks
        drawn_step = step_of(model, scaler)
        for _ in range(setting.sized(20, 1)):
            drawn_step()  # these steps are not timed, because the report inspects dtypes at the first step
        repeat = setting.sized(20, 1)
        yield Comparison(
            name=name,
            table="A training step that updates a run report",
            samples={
                OURS: setting.host_clock(drawn_step, repeat=repeat),
                HOOKED: setting.host_clock(hooked_step, repeat=repeat),
                NOT_DRAWN: setting.host_clock(
                    step_of(plain, GradScaler(setting.device, enabled=False)), repeat=repeat
                ),
            },
            rounds=setting.rounds(15),
            gates=(Gate(limit=1.05, against=NOT_DRAWN),) if setting.device == "cpu" else (),
        )


SECTIONS = (Diagnosis(),)
