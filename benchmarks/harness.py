"""Time several variants of a computation alternately, and compare their medians with promised limits.

A round takes one sample of each variant, in random order. Ratios are computed within a round, so slow changes
in the machine's speed affect both numbers of a ratio. The reported value is the median over the rounds. The
reported spread is the interquartile range over the rounds. If the process had to wait for a CPU in some
rounds, up to 50 % more rounds are run. Only the rounds in which the process waited least are used.
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
TOLERANCE = 1.1  # a comparison fails if it exceeds its limit by more than 10 %
CALM = 0.02  # a round is undisturbed if the process waits at most 2 % of its time


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number that is computed from two samples and compared with a promised limit.

    Attributes:
        of: A function that computes the number from our sample and the other variant's sample in one round.
        at_least: Whether the limit is a lower limit.
        text: The format of the number.
        limit_text: The format string of the limit, if it differs from the format of the number.
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
    # amp_plugin is allowed to be slower than the other variant by up to 5 % or 0.1 us, whichever is more
    "share of max(5 %, 0.1 us)": Measure(
        of=lambda ours, theirs: (ours - theirs) / max(0.05 * theirs, 0.1),
        text="{:.2f}",
        limit_text="{:.0f} x max(5 %, 0.1 µs)",
        promise="at most 5 % or 0.1 µs more",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median and the quartiles of a list of samples."""

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
    """A limit that the documentation promises for the result of a comparison.

    Attributes:
        limit: The limit of the measure.
        measure: The measure, a key of ``MEASURES``.
        against: The label of the variant that amp_plugin is compared with. If ``measure`` is
            ``"ours"``, the limit applies to amp_plugin's own result, and ``against`` is amp_plugin's label.
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
    """The result of a gate. ``holds`` says whether ``value`` meets ``limit`` within the tolerance of 10 %."""

    measure: str
    against: str
    limit: float
    value: float
    holds: bool

    @property
    def text(self) -> str:
        """The measured value and its limit as text, such as ``1.03x, at most 1.15x``."""
        measure = MEASURES[self.measure]
        bound = "at least" if measure.at_least else "at most"
        limit_text = measure.limit_text or measure.text
        return f"{measure.text.format(self.value)}, {bound} {limit_text.format(self.limit)}"

    @property
    def kept(self) -> bool:
        """Whether the measured value meets the limit even without the tolerance."""
        at_least = MEASURES[self.measure].at_least
        return self.value >= self.limit if at_least else self.value <= self.limit

    @property
    def promise(self) -> str:
        """The promised limit as text, followed by ``kept``, ``just missed`` or ``missed``."""
        became = "kept" if self.kept else "just missed" if self.holds else "missed"
        return f"{MEASURES[self.measure].promise.format(self.limit)}: {became}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Variants of a computation that are run alternately and compared.

    Attributes:
        name: The row of the table.
        samples: Maps the label of each variant to a function that measures one sample, in ``unit``. The first
            variant is amp_plugin.
        table: The name of the table. All comparisons in one table must have the same labels.
        unit: The unit of a sample: ``"us"``, ``"bytes"`` or another one.
        rounds: The number of rounds whose samples are used.
        warm_up: The number of warm-up rounds, whose samples are discarded.
        per: The number of ops, tensors or micro-batches in one sample. Samples are divided by this number.
        x: The position on the horizontal axis, if the table has a plot.
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
    """The result of a comparison, with the fields of ``Comparison`` and summaries of the samples.

    Attributes:
        times: Maps the label of each variant to a summary of its samples, divided by ``Comparison.per``.
        ratios: Maps the label of each variant except amp_plugin to a summary of the ratios between
            amp_plugin's samples and the samples of that variant. Each ratio is amp_plugin's sample divided by
            the other variant's sample. A variant is left out if one of its measured values is 0.
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
        """Convert the result of ``dataclasses.asdict`` back to an Outcome."""
        summaries = {
            key: {label: Spread(**kept) for label, kept in data[key].items()} for key in ("times", "ratios")
        }
        verdicts = tuple(Verdict(**verdict) for verdict in data["verdicts"])
        return cls(**{**data, **summaries, "verdicts": verdicts})


def judge(gate: Gate, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """Compute a measure, such as a time ratio, in each round, and compare its median with the limit."""
    measure = MEASURES[gate.measure]
    value = statistics.median(measure.of(a, b) for a, b in zip(ours, theirs, strict=True))
    holds = value >= gate.limit / TOLERANCE if measure.at_least else value <= gate.limit * TOLERANCE
    return Verdict(
        measure=gate.measure, against=gate.against, limit=gate.limit, value=value, holds=bool(holds)
    )


def measure(comparison: Comparison) -> Outcome:
    """Run the variants of a comparison alternately, and summarise the samples."""
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
    """Take one sample of each variant. Also return the fraction of time that the process waited for a CPU."""
    start, before = time.perf_counter(), waited()
    values = {label: comparison.samples[label]() / comparison.per for label in labels}
    return (waited() - before) / (time.perf_counter() - start), values
