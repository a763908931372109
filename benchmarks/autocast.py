"""Time the autocast core beside torch.autocast in one process.

Two variants run in turn, round by round, each first in every other round; the difference or ratio
is taken within a round, and the median over the rounds counts. Times are CPU time of the calling
thread per call, with one thread, so other work on the machine disturbs less.

    python benchmarks/autocast.py                  # the table
    python benchmarks/autocast.py --check          # exit 1 if a gate is missed by more than 10 %
    python benchmarks/autocast.py --rounds 101 --only gpt
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from amp_plugin import CastCache, autocast, log_casts
from amp_plugin.casting import active
from amp_plugin.kernels.build import require_native

BF16 = torch.bfloat16
MICRO_BATCHES = 8
TOLERANCE = 1.1

Call = Callable[[], object]
Around = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One comparison: ours and theirs, each called inside a context, and what is allowed.

    Attributes:
        value: (microseconds of ours, of theirs) -> the measure; at most ``limit``.
        says: how the measure is shown.
        repeat: calls per sample.
    """

    name: str
    ours: Call
    theirs: Call
    around_ours: Around = nullcontext
    around_theirs: Around = nullcontext
    value: Callable[[float, float], float] = lambda ours, theirs: ours / theirs
    limit: float
    says: str = "{:.3f} x"
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Medians in microseconds per call, and the median of the measure over the rounds."""

    gate: Gate
    ours: float
    theirs: float
    measure: float

    @property
    def holds(self) -> bool:
        """The gate is kept, within the tolerance for a busy machine."""
        return self.measure <= self.gate.limit * TOLERANCE


class GPT(nn.Module):
    """A GPT so narrow that the launches cost more than the arithmetic."""

    def __init__(self, layers: int = 6, width: int = 64, heads: int = 4, words: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of (batch, length, width) after the block."""
        heads = self.qkv(self.norm_a(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_f(x))))


@contextmanager
def uninstalled() -> Iterator[None]:
    """Run on torch's own kernels."""
    active.uninstall()
    try:
        settle()
        yield
    finally:
        active.install()


@contextmanager
def installed() -> Iterator[None]:
    """Run on ours, after the same work on the dispatcher."""
    active.uninstall()
    active.install()
    settle()
    yield


def settle() -> None:
    """Run other ops until what changing the dispatcher left in the caches is gone."""
    x = torch.ones(4, 4)
    for _ in range(5000):
        x.mm(x)


@contextmanager
def both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    """Hold two contexts."""
    with outer, inner:
        yield


def torch_region() -> AbstractContextManager[object]:
    """Open torch's region."""
    return torch.autocast("cpu", BF16)  # type: ignore[no-any-return]


def our_region() -> AbstractContextManager[object]:
    """Open ours."""
    return autocast("cpu", BF16)


def listed_ops() -> dict[str, Call]:
    """Small listed ops with nothing to cast, one for each rule."""
    x, w, b = (torch.randn(4, 4, dtype=BF16) for _ in range(3))
    single = torch.randn(4, 4)
    return {
        "linear": lambda: functional.linear(x, w, b[0]),
        "mm": lambda: torch.mm(x, w),
        "mse_loss": lambda: functional.mse_loss(single, single),
        "cat": lambda: torch.cat([x, w]),
    }


def op_gates() -> list[Gate]:
    """Make the gates of single ops."""
    gates = []
    for name, call in listed_ops().items():
        gates.append(
            Gate(
                name=f"{name}, nothing to cast: max(5 %, 0.1 us)",
                ours=call,
                theirs=call,
                around_ours=our_region,
                around_theirs=torch_region,
                value=lambda ours, theirs: (ours - theirs) / max(0.05 * theirs, 0.1),
                limit=1.0,
                says="{:.2f} of it",
                repeat=500,
            )
        )
    call = listed_ops()["linear"]
    no_region = Gate(
        name="linear, no region, core loaded",
        ours=call,
        theirs=call,
        around_ours=installed,
        around_theirs=uninstalled,
        limit=1.01,
        repeat=10000,
    )
    foreign = Gate(
        name="linear, in torch.autocast, core loaded",
        ours=call,
        theirs=call,
        around_ours=lambda: both(installed(), torch_region()),
        around_theirs=lambda: both(uninstalled(), torch_region()),
        value=lambda ours, theirs: ours - theirs,
        limit=0.2,
        says="{:+.3f} us",
        repeat=10000,
    )
    return [*gates, no_region, foreign]


def region_gate() -> Gate:
    """Make the gate of opening and closing a region."""

    def ours() -> None:
        with autocast("cpu", BF16):
            pass

    def theirs() -> None:
        with torch.autocast("cpu", BF16):
            pass

    return Gate(name="enter + exit", ours=ours, theirs=theirs, limit=0.4, repeat=500)


def gpt_gates() -> list[Gate]:
    """Make the gates of the launch-bound GPT: one batch, and a window of micro-batches."""
    torch.manual_seed(0)
    model, tokens = GPT(), torch.randint(128, (MICRO_BATCHES, 2, 16))

    def step(region: Callable[[], AbstractContextManager[object]], count: int) -> None:
        for each in tokens[:count]:
            with region():
                loss = model(each) / count
            loss.backward()
        model.zero_grad()

    def window_with_cache() -> None:
        cache = CastCache()
        step(lambda: autocast("cpu", BF16, cache=cache), MICRO_BATCHES)

    one = Gate(
        name="GPT forward + backward",
        ours=lambda: step(our_region, 1),
        theirs=lambda: step(torch_region, 1),
        limit=1.0,
        repeat=2,
    )
    window = Gate(
        name=f"GPT, {MICRO_BATCHES} micro-batches, CastCache",
        ours=window_with_cache,
        theirs=lambda: step(torch_region, MICRO_BATCHES),
        limit=1.0,
    )
    return [one, window]


def weight_casts() -> tuple[int, int]:
    """Count the casts of weights in a window: with a CastCache, and without."""
    model, tokens = GPT(), torch.randint(128, (MICRO_BATCHES, 2, 16))

    def count(cache: CastCache | None) -> int:
        with log_casts(model) as log:
            for each in tokens:
                with autocast("cpu", BF16, cache=cache):
                    model(each)
        return sum(cast.kind == "weight" and not cast.cached for cast in log.records())

    return count(CastCache()), count(None)


def sample(call: Call, around: Around, repeat: int) -> float:
    """Return microseconds per call; opening the context is not timed."""
    with around():
        call()
        start = time.thread_time_ns()
        for _ in range(repeat):
            call()
        return (time.thread_time_ns() - start) / repeat / 1000


def measure(gate: Gate, rounds: int) -> Outcome:
    """Run both variants in turn."""
    ours, theirs = [], []
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds + 2):
            pair = [(ours, gate.ours, gate.around_ours), (theirs, gate.theirs, gate.around_theirs)]
            for times, call, around in pair if index % 2 else reversed(pair):
                times.append(sample(call, around, gate.repeat))
    finally:
        gc.enable()
    ours, theirs = ours[2:], theirs[2:]  # the first rounds warm up
    values = [gate.value(a, b) for a, b in zip(ours, theirs, strict=True)]
    return Outcome(
        gate=gate,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        measure=statistics.median(values),
    )


def show(outcomes: list[Outcome], casts: tuple[int, int]) -> None:
    """Print the table with what it was measured on."""
    console = Console()
    machine = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    title = f"{machine}, torch {torch.__version__}, {dt.datetime.now(tz=dt.timezone.utc).date()}"
    table = Table("", "ours us", "torch us", "measured", "at most", "", title=title)
    for each in outcomes:
        says = each.gate.says
        times = (f"{each.ours:.2f}", f"{each.theirs:.2f}")
        compared = (says.format(each.measure), says.format(each.gate.limit))
        table.add_row(each.gate.name, *times, *compared, "" if each.holds else "[red]missed")
    console.print(table)
    window = f"casts of weights in {MICRO_BATCHES} micro-batches"
    console.print(f"{window}: {casts[0]} with CastCache, {casts[1]} without")


def main() -> int:
    """Measure and print; with --check say by the exit code whether all gates hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--only", default="", help="only gates whose name contains this")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    require_native("the benchmark of autocast")
    active.install()
    gates = [*op_gates(), region_gate(), *gpt_gates()]
    wanted = [gate for gate in gates if options.only.lower() in gate.name.lower()]
    outcomes = [measure(gate, options.rounds) for gate in wanted]
    casts = weight_casts()
    show(outcomes, casts)
    weights = sum(isinstance(module, nn.Linear) for module in GPT().modules())
    biases = weights - 1  # the head has none
    counted = casts == (weights + biases, MICRO_BATCHES * (weights + biases))
    if not counted:
        print(f"expected {weights + biases} casts of weights in a window", file=sys.stderr)
    return int(options.check and not (counted and all(each.holds for each in outcomes)))


if __name__ == "__main__":
    sys.exit(main())
