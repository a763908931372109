"""Time the scaling core beside torch.amp in one process.

Each line is a ratio with a limit: ours over theirs, or theirs over ours (a speed-up). Variants
run in turn, round by round. Of each the median of its fastest third counts: what else runs on the
machine only adds time, and the rounds it disturbed are dropped.

    python -m benchmarks.scaling                  # the table
    python -m benchmarks.scaling --check          # exit 1 if a limit is missed
    python -m benchmarks.scaling --rounds 41 --threads 2
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A script's own folder comes first in sys.path, and there cuda.py would hide the package `cuda`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.console import Console
from rich.table import Table

from amp_plugin import GradScaler
from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.kernels.build import require_native
from amp_plugin.scaling.gradients import make_ledger

Call = Callable[[], object]
OP = torch.ops.amp_plugin
RESNET50 = "resnet50"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One measured line: two calls, and the limit of their ratio."""

    name: str
    ours: Call
    theirs: Call
    limit: float
    speedup: bool = False  # theirs / ours, at least the limit; else ours / theirs, at most
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Medians in microseconds, the ratio, and whether the limit was kept."""

    line: Line
    ours: float
    theirs: float
    ratio: float

    @property
    def kept(self) -> bool:
        """Whether the limit was kept."""
        return self.ratio >= self.line.limit if self.line.speedup else self.ratio <= self.line.limit


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50 (He et al. 2015), 25.6 million elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            shapes += [(inner, width, 1, 1), (inner,), (inner,), (inner, inner, 3, 3), (inner,), (inner,)]
            shapes += [(4 * inner, inner, 1, 1), (4 * inner,), (4 * inner,)]
            if block == 0:
                shapes += [(4 * inner, width, 1, 1), (4 * inner,), (4 * inner,)]
            width = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


SHAPES = {
    "1 x 100 MB": [(25_000_000,)],
    "ResNet-50": resnet50_shapes(),
    "1000 x 100 KB": [(25_600,)] * 1000,
    "1000 x 1 KB": [(256,)] * 1000,
}


class Bench:
    """Parameters with gradients, an optimizer, and one scaler of each kind."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator) * 1e-3
        self.grads = [param.grad for param in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-9, fused=True)
        self.ledger = make_ledger(self.params)
        self.ours = GradScaler("cpu", init_scale=1.0000001, dynamic=False)
        self.theirs = torch.amp.GradScaler("cpu", init_scale=1.0000001)
        self.ours.register(self.optimizer)
        self.loss = torch.ones((), requires_grad=True)

    def new_window(self) -> None:
        """Make the gradients scaled ones again, as a backward does."""
        self.ours.scale(self.loss).backward()
        self.theirs.scale(self.loss)
        self.theirs._per_optimizer_states.clear()

    def clip_ours(self, *, fold: bool) -> None:
        """Unscale and clip; with ``fold`` the optimizer's kernel gets one number instead."""
        unit = self.ours._loss_scale
        for one in self.ours._registry.sets():
            one.unit, one.parts = unit, None
        for record in self.ours._registry:
            record.clip = None
        self.ours.clip_grad_norm_(self.optimizer, 1e9, fold=fold)

    def clip_theirs(self) -> None:
        """Unscale and clip as torch does."""
        self.theirs._per_optimizer_states.clear()
        self.theirs.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1e9)

    def step_ours(self) -> None:
        """The whole step after a backward."""
        self.clip_ours(fold=True)
        self.ours.step(self.optimizer)
        self.ours.update()

    def step_theirs(self) -> None:
        """The whole step after a backward."""
        self.clip_theirs()
        self.theirs.step(self.optimizer)
        self.theirs.update()


def kernel_lines() -> list[Line]:
    """The ops against what the memory can do."""
    bench = Bench(SHAPES["1 x 100 MB"])
    grad, copy = bench.grads[0], torch.empty_like(bench.grads[0])
    half = torch.empty_like(grad, dtype=torch.bfloat16)
    factor = torch.tensor(1.0000001)
    return [
        Line(
            name="norm_check of 100 MB / torch.sum",
            ours=lambda: OP.norm_check(bench.grads, factor),
            theirs=grad.sum,
            limit=1.15,
        ),
        Line(
            name="norm_check of 100 MB / copy_",
            ours=lambda: OP.norm_check(bench.grads, factor),
            theirs=lambda: copy.copy_(grad),
            limit=0.5,
        ),
        Line(
            name="unscale_ with norm and check, 100 MB / mul_",
            ours=lambda: OP.unscale_(bench.grads, factor),
            theirs=lambda: grad.mul_(1.0000001),
            limit=1.1,
        ),
        Line(
            name="multiply_ of 100 MB / mul_",
            ours=lambda: OP.multiply_(bench.grads, factor),
            theirs=lambda: grad.mul_(1.0000001),
            limit=1.1,
        ),
        Line(
            name="cast of 100 MB to bfloat16 / _foreach_copy_",
            ours=lambda: OP.cast([grad], [half]),
            theirs=lambda: torch._foreach_copy_([half], [grad]),
            limit=1.1,
        ),
    ]


def clip_line(name: str, limit: float, *, fold: bool) -> Line:
    """Unscale and clip one set of shapes through GradScaler."""
    bench = Bench(SHAPES[name])
    bench.new_window()
    return Line(
        name=f"unscale + clip through GradScaler, {'folded' if fold else 'in place'}, {name}",
        ours=lambda: bench.clip_ours(fold=fold),
        theirs=bench.clip_theirs,
        limit=limit,
        speedup=True,
        repeat=10 if name == "1000 x 1 KB" else 1,
    )


def clip_lines() -> list[Line]:
    """Unscale and clip against torch.amp, and whole steps."""
    lines = []
    for name, limit in (("ResNet-50", 3.0), ("1000 x 100 KB", 5.0), ("1000 x 1 KB", 25.0)):
        lines += [clip_line(name, limit, fold=True), clip_line(name, 1.0, fold=False)]
    small = Bench(SHAPES["1000 x 1 KB"])
    small.new_window()
    factor = torch.tensor(1.0000001)
    lines.append(
        Line(
            name="unscale + clip in the ops, folded, 1000 x 1 KB",
            ours=lambda: small.ledger.norm_check(factor, 2.0),
            theirs=small.clip_theirs,
            limit=50.0,
            speedup=True,
            repeat=10,
        )
    )
    whole = Bench(SHAPES["ResNet-50"])
    whole.new_window()
    lines.append(
        Line(
            name="whole step, fused AdamW and clipping, ResNet-50",
            ours=whole.step_ours,
            theirs=whole.step_theirs,
            limit=1.35,
            speedup=True,
        )
    )
    return lines


def timed(call: Call, repeat: int) -> float:
    """Microseconds for one call."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def calm(times: list[float]) -> float:
    """The median of the undisturbed rounds: a busy machine only adds time, so the fastest third."""
    return statistics.median(sorted(times)[: max(3, len(times) // 3)])


def measure(line: Line, rounds: int) -> Outcome:
    """Run both calls in turn and compare their undisturbed rounds."""
    timed(line.ours, 2)
    timed(line.theirs, 2)
    pairs = [(timed(line.ours, line.repeat), timed(line.theirs, line.repeat)) for _ in range(rounds)]
    ours, theirs = (calm(list(times)) for times in zip(*pairs, strict=True))
    return Outcome(
        line=line, ours=ours, theirs=theirs, ratio=theirs / ours if line.speedup else ours / theirs
    )


def per_tensor(rounds: int) -> tuple[float, float]:
    """Microseconds a tensor of ``norm_check`` and ``unscale_`` for 1000 tensors of 1 KB, looked up in C++."""
    bench = Bench(SHAPES["1000 x 1 KB"])
    factor = torch.tensor(1.0000001)
    calls = (lambda: bench.ledger.norm_check(factor, 2.0), lambda: bench.ledger.unscale_(factor, 2.0))
    norm_check, unscale = (calm([timed(call, 10) for _ in range(rounds)]) / 1000 for call in calls)
    return norm_check, unscale


def norm_errors() -> tuple[float, float]:
    """Relative errors of the norm of 1e8 elements, ours and torch's, against float64."""
    grad = torch.rand(100_000_000).add_(0.5)
    right = math.sqrt(sum(part.double().square().sum().item() for part in grad.split(1_000_000)))
    ours = OP.norm_check([grad], torch.tensor(1.0))[0].item()
    theirs = torch.nn.utils.get_total_norm([grad]).item()
    return abs(ours / right - 1), abs(theirs / right - 1)


def kept(limit: bool) -> str:
    """Say whether a limit was kept."""
    return "yes" if limit else "NO"


def main() -> int:
    """Print the table; return 1 if ``--check`` was given and a limit missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    require_native("benchmarks/scaling.py")
    torch.set_num_threads(options.threads)
    console = Console(width=120)
    stamp = dt.datetime.now(tz=dt.timezone.utc).date()
    console.print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, {stamp}")
    table = Table("measurement", "ours us", "theirs us", "ratio", "limit", "kept")
    missed = 0
    for make in (kernel_lines, clip_lines):
        for line in make():
            outcome = measure(line, options.rounds)
            sign = ">=" if line.speedup else "<="
            missed += not outcome.kept
            table.add_row(
                line.name,
                f"{outcome.ours:.1f}",
                f"{outcome.theirs:.1f}",
                f"{outcome.ratio:.2f}",
                f"{sign} {line.limit}",
                kept(outcome.kept),
            )
    for name, value in zip(("norm_check", "unscale_"), per_tensor(options.rounds), strict=True):
        missed += value > 0.1
        table.add_row(f"{name}, us a tensor of 1 KB", f"{value:.3f}", "", "", "<= 0.1", kept(value <= 0.1))
    ours, theirs = norm_errors()
    missed += ours > 1e-6
    name = "norm of 1e8 elements, relative error"
    table.add_row(name, f"{ours:.1e}", f"{theirs:.1e}", "", "<= 1e-06", kept(ours <= 1e-6))
    console.print(table)
    return int(options.check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
