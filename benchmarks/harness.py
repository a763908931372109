"""Compare variants that run in turns: samples, medians, ratios with their spread, and gates.

One round takes one sample of each variant, in random order. Ratios are taken within a round, so slow changes
of the machine affect both numbers of a ratio. The result is the median over the rounds. The spread is the
interquartile range over the rounds. Rounds in which this process had to wait for a processor are repeated:
up to half as many more rounds are run, and the rounds with the least waiting count.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.clocks import Sample, waited

OURS = "amp_plugin"
TOLERANCE = 1.1  # a gate fails when it is missed by more than 10 %
CALM = 0.02  # the share of the time that a process may wait in a round that counts as undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """The number that a gate compares with a limit.

    Attributes:
        of: A function of our sample and theirs in one round that returns the number.
        at_least: Whether the limit is a lower limit.
        text: The format of the number.
        limit_text: The format of the limit, if it differs from the format of the number.
        promise: The format of the limit on the page.
    """

    of: Callable[[float, float], float]
    at_least: bool = False
    text: str = "{:.2f}x"
    limit_text: str = ""
    promise: str = "at most {:.2f}"


MEASURES = {
    "ours / theirs": Measure(of=lambda ours, theirs: ours / theirs),
    "theirs / ours": Measure(
        of=lambda ours, theirs: theirs / ours, at_least=True, promise="at least {:.2f} times as fast"
    ),
    "share of theirs": Measure(
        of=lambda ours, theirs: ours / theirs,
        at_least=True,
        text="{:.0%}",
        promise="at least {:.0%} of theirs",
    ),
    "ours - theirs": Measure(
        of=lambda ours, theirs: ours - theirs, text="{:+.3f} µs", promise="at most {:.3f} µs more"
    ),
    "ours": Measure(of=lambda ours, _: ours, text="{:.3g}", promise="at most {:.3g}"),
    # (ours - theirs) / max(5 % of theirs, 0.1 us): up to 1 is allowed
    "share of max(5 %, 0.1 us)": Measure(
        of=lambda ours, theirs: (ours - theirs) / max(0.05 * theirs, 0.1),
        text="{:.2f}",
        limit_text="{:.0f} x max(5 %, 0.1 µs)",
        promise="at most 5 % or 0.1 µs more",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A median and the interquartile range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one or more values."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A limit that a comparison promises to keep.

    Attributes:
        limit: The limit of the measure.
        measure: The measure, a key of ``MEASURES``.
        against: The variant that ours is compared with. For the measure ``"ours"`` it is ours itself.
    """

    limit: float
    measure: str = "ours / theirs"
    against: str = "torch"

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            msg = f"there is no measure {self.measure!r}; choose one of {', '.join(MEASURES)}"
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a gate: ``value``, ``limit``, and whether the limit is kept within the tolerance."""

    measure: str
    against: str
    limit: float
    value: float
    holds: bool

    @property
    def text(self) -> str:
        """The value and its limit, as ``1.03x, at most 1.15x``."""
        measure = MEASURES[self.measure]
        bound = "at least" if measure.at_least else "at most"
        limit_text = measure.limit_text or measure.text
        return f"{measure.text.format(self.value)}, {bound} {limit_text.format(self.limit)}"

    @property
    def kept(self) -> bool:
        """Whether the promise is kept exactly, without the tolerance."""
        at_least = MEASURES[self.measure].at_least
        return self.value >= self.limit if at_least else self.value <= self.limit

    @property
    def promise(self) -> str:
        """The promise and whether it is kept, as ``at most 1.15: kept``."""
        became = "kept" if self.kept else "just missed" if self.holds else "missed"
        return f"{MEASURES[self.measure].promise.format(self.limit)}: {became}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Variants that are run in turns and compared.

    Attributes:
        name: The row of the table.
        samples: Maps a label to a function that takes one sample in ``unit``. The first label is ours.
        table: The name of the table. Comparisons of the same table must have the same labels.
        unit: The unit of a sample: ``"us"``, ``"bytes"`` or another one.
        rounds: The number of rounds that count.
        warm_up: The number of rounds before them, which do not count.
        per: The number of items in one sample (ops, tensors, micro-batches). Samples are divided by it.
        x: The position on the axis of a plot, if the table has a plot.
        remark: A text that is shown next to the row.
    """

    name: str
    samples: Mapping[str, Sample]
    table: str = ""
    unit: str = "us"
    rounds: int = 21
    warm_up: int = 1
    per: float = 1.0
    x: float | None = None
    gates: tuple[Gate, ...] = ()
    remark: str = ""

    def __post_init__(self) -> None:
        for gate in self.gates:
            if gate.against not in self.samples:
                msg = f"{self.name!r} has no variant {gate.against!r} for its gate, only {list(self.samples)}"
                raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a comparison. It has the fields of its ``Comparison``, with summaries for samples.

    Attributes:
        times: Maps a label to a summary of the samples of this variant, divided by ``per``.
        ratios: Maps a label to a summary of ours / this variant within a round. A variant that measured 0 is
            left out.
    """

    name: str
    table: str
    unit: str
    x: float | None
    remark: str
    rounds: int
    times: Mapping[str, Spread]
    ratios: Mapping[str, Spread]
    verdicts: tuple[Verdict, ...] = field(default=())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Make an outcome from the result of ``dataclasses.asdict``."""
        summaries = {
            key: {label: Spread(**kept) for label, kept in data[key].items()} for key in ("times", "ratios")
        }
        verdicts = tuple(Verdict(**verdict) for verdict in data["verdicts"])
        return cls(**{**data, **summaries, "verdicts": verdicts})


def judge(gate: Gate, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Compare the median of a gate's measure with the limit."""
    measure = MEASURES[gate.measure]
    value = statistics.median(measure.of(a, b) for a, b in zip(ours, theirs, strict=True))
    holds = value >= gate.limit / TOLERANCE if measure.at_least else value <= gate.limit * TOLERANCE
    return Verdict(
        measure=gate.measure, against=gate.against, limit=gate.limit, value=value, holds=bool(holds)
    )


def measure(comparison: Comparison) -> Outcome:
    """Run the variants of a comparison in turns and summarise them."""
    taken = _rounds(comparison)
    first = next(iter(taken))
    return Outcome(
        name=comparison.name,
        table=comparison.table,
        unit=comparison.unit,
        x=comparison.x,
        remark=comparison.remark,
        rounds=comparison.rounds,
        times={label: Spread.of(values) for label, values in taken.items()},
        ratios={
            label: Spread.of([a / b for a, b in zip(taken[first], values, strict=True)])
            for label, values in taken.items()
            if label != first and all(values)
        },
        verdicts=tuple(judge(gate, taken[first], taken[gate.against]) for gate in comparison.gates),
    )


def _rounds(comparison: Comparison) -> dict[str, list[float]]:
    labels = list(comparison.samples)
    order = random.Random(0)
    taken: list[tuple[float, dict[str, float]]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(comparison.warm_up):
            _round(comparison, labels)
        for _ in range(comparison.rounds + (comparison.rounds + 1) // 2):
            order.shuffle(labels)
            taken.append(_round(comparison, labels))
            if sum(disturbed <= CALM for disturbed, _ in taken) == comparison.rounds:
                break
    finally:
        gc.enable()
    calmest = sorted(taken, key=lambda round_taken: round_taken[0])[: comparison.rounds]
    return {label: [values[label] for _, values in calmest] for label in comparison.samples}


def _round(comparison: Comparison, labels: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Take one sample of each variant. Also return the share of the time that the process has waited."""
    start, before = time.perf_counter(), waited()
    values = {label: comparison.samples[label]() / comparison.per for label in labels}
    return (waited() - before) / (time.perf_counter() - start), values
