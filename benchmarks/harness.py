"""Compare variants that run in turns: samples, medians, ratios with their spread, and gates.

One round takes one sample of each variant, in random order. A ratio is taken within a round, so what
changes slowly on the machine is in both of its terms, and the median over the rounds counts. The spread
is the range of the middle half of the rounds. Rounds in which other programs kept ours from a processor
are taken again: up to half as many more rounds are run, and those with the least waiting count.
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
CALM = 0.02  # seconds of waiting a second in a round that counts as undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What a gate looks at.

    Attributes:
        of: (ours, theirs) of one round, in the unit of the comparison -> the number.
        at_least: Whether the limit is a lower one.
        text: How the number is written.
        limit_text: How its limit is, if otherwise.
        promise: How the limit is written on the page.
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
    """A median and the range of the middle half."""

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
        limit: In the terms of the measure.
        measure: A key of ``MEASURES``.
        against: The variant that ours is compared with, or ours itself for the measure ``"ours"``.
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
    """What became of a gate: ``value`` beside ``limit``, and whether it holds within the tolerance."""

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
        """Whether the promise is kept as it stands, without the tolerance."""
        at_least = MEASURES[self.measure].at_least
        return self.value >= self.limit if at_least else self.value <= self.limit

    @property
    def promise(self) -> str:
        """The promise and what became of it, as ``at most 1.15: kept``."""
        became = "kept" if self.kept else "just missed" if self.holds else "missed"
        return f"{MEASURES[self.measure].promise.format(self.limit)}: {became}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Variants to run in turns.

    Attributes:
        name: Row of the table.
        samples: Label -> one sample in ``unit``; the first is ours, or the first of ours.
        table: Comparisons with the same name of a table share it, and must have the same labels.
        unit: ``"us"``, ``"bytes"`` or what else one sample returns.
        rounds: How often each variant runs, after one round to warm up.
        warm_up: Rounds not counted.
        per: Things in one sample (ops, tensors, micro-batches); samples are divided by it.
        x: Place on the axis of a plot, if the table has one.
        remark: Shown beside the row.
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
    """What a comparison measured: as its ``Comparison``, with summaries for samples.

    Attributes:
        times: Label -> the samples of a variant, divided by ``per``.
        ratios: Label -> ours / that variant, within a round; not of a variant that measured 0.
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
        """Rebuild what ``dataclasses.asdict`` took apart."""
        summaries = {
            key: {label: Spread(**kept) for label, kept in data[key].items()} for key in ("times", "ratios")
        }
        verdicts = tuple(Verdict(**verdict) for verdict in data["verdicts"])
        return cls(**{**data, **summaries, "verdicts": verdicts})


def judge(gate: Gate, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Compare the median of a gate's measure with its limit."""
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
    """Take one sample of each variant; also return the share of the time that was spent waiting."""
    start, before = time.perf_counter(), waited()
    values = {label: comparison.samples[label]() / comparison.per for label in labels}
    return (waited() - before) / (time.perf_counter() - start), values
