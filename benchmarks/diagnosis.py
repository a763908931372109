"""What watching ops costs: nothing while no region is open, and how much in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from amp_plugin import diagnose, shadow_run
from benchmarks.autocast import our_region
from benchmarks.clocks import Call
from benchmarks.forward_backward import window
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import compute_bound_gpt, launch_bound_gpt
from benchmarks.setting import Section, Setting

WITHOUT = "no region"


class Diagnosis(Section):
    """Ops after a region of diagnose was closed, and training steps in one."""

    key = "diagnosis"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield an op while nothing is armed, and forward and backward passes in armed regions."""
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


def not_armed(setting: Setting) -> Comparison:
    """Compare an op after a region was opened and closed with the op before."""
    x = torch.randn(4, 4, device=setting.device)

    def opened_and_closed() -> None:
        with diagnose():
            x.add(x)

    repeat = setting.sized(5000, 2)
    return Comparison(
        name="add, 4 x 4",
        table="An op while no region of diagnose is open",
        samples={
            OURS: setting.host_clock(lambda: x.add(x), repeat=repeat, prepare=opened_and_closed),
            WITHOUT: setting.host_clock(lambda: x.add(x), repeat=repeat),
        },
        rounds=setting.rounds(21),
        gates=(Gate(limit=1.0, against=WITHOUT),) if setting.device == "cpu" else (),
    )


def armed(setting: Setting, name: str, step: Call) -> Comparison:
    """Compare forward and backward passes in each kind of region with those outside."""
    regions: dict[str, type[AbstractContextManager[object]] | object] = {
        "diagnose": diagnose,
        "shadow_run": shadow_run,
        WITHOUT: nullcontext,
    }
    return Comparison(
        name=name,
        table="Forward + backward of one batch, watched",
        samples={
            label: setting.host_clock(step, prepare=step, around=region)  # type: ignore[arg-type]
            for label, region in regions.items()
        },
        rounds=setting.rounds(5),
    )


SECTIONS = (Diagnosis(),)
