"""Two recorded runs: where they differ first by more than rounding explains.

for each result that both runs have:
    d(input) = difference of each input between the runs
    allowed = 1.5 * answer(d of the inputs + eps / 2) + d of discrete inputs + rounding of the result
        where answer(d) was measured as the runs were recorded: by how much the result changes with its inputs
    if an input comes from an op that one run alone has: it may differ by what that op makes of its own inputs
    more than allowed: not rounding
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from amp_plugin.numerics.op import listed
from amp_plugin.numerics.record import NUDGES, OpRecord, Run
from amp_plugin.numerics.values import as_json

_Key = tuple[int, str, str, str, int]

_SAFETY = 1.5
_FP32_EPS = 2.0**-23


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that two runs do not share."""

    first: OpRecord  # the results
    second: OpRecord
    relative: float  # the difference, as Fingerprint.difference says
    inputs: float  # the largest difference among the op's inputs
    rounding: float  # what the inputs' differences and rounding may come to
    alone: str = ""  # the op that one run alone has, if an input that it made is what differs; else empty

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.rounding

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        first = self.first
        place = {"op": first.op, "module": first.module, "direction": first.direction, "step": first.step}
        place |= {"line": first.line, "dtypes": [first.dtype, self.second.dtype], "alone": self.alone}
        numbers = {"relative": self.relative, "inputs": self.inputs, "rounding": self.rounding}
        return {
            **place,
            **{name: as_json(number) for name, number in numbers.items()},
            "is_rounding": self.is_rounding,
        }

    def __str__(self) -> str:
        dtypes = "" if self.first.dtype == self.second.dtype else f" against {self.second.dtype}"
        verdict = "rounding explains it" if self.is_rounding else "rounding does not explain it"
        line = f"\n  line        {self.first.line}" if self.first.line else ""
        alone = f"\n  its input   comes from {self.alone}, which one run alone has" if self.alone else ""
        return (
            f"{self.first}{dtypes}{line}{alone}\n  difference  {self.relative:.2g}, relative; {verdict}: "
            f"inputs that differ by {self.inputs:.2g} allow {self.rounding:.2g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs compared.

    Attributes:
        compared: results both runs have.
        only_first, only_second: results that one of them has, such as casts.
        differing: how many of those compared differ in a bit.
        first: the first that differs; None if none does.
        unexplained: the first that rounding does not explain; None if none is.
        unseen: module -> the difference of its forward results up to which rounding explains it.
        unmeasured: ops that did not run again on changed inputs -> how often; they are taken to answer by as
            much as their inputs change.
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None
    unseen: dict[str, float]
    unmeasured: dict[str, int]

    def report(self) -> str:
        """Return what is known, as text."""
        counts = f"{self.compared} results compared, {self.differing} differ"
        if self.only_first or self.only_second:
            counts += (
                f"; {self.only_first} are in the first run alone, {self.only_second} in the second alone"
            )
        if self.first is None:
            return f"{counts}: what both runs have is equal, bit for bit"
        parts = [counts, f"first difference: {self.first}"]
        if self.unexplained is None:
            parts.append("rounding explains every difference")
        elif self.unexplained is not self.first:
            parts.append(f"first that rounding does not explain: {self.unexplained}")
        coarsest = sorted(self.unseen.items(), key=lambda row: -row[1])[:3]
        limits = ", ".join(f"below {limit:.1g} at {module or '(no module)'}" for module, limit in coarsest)
        parts.append(f"not to be told from rounding: differences {limits}")
        if self.unmeasured:
            parts.append(f"not measured: by how much the results answer of {listed(self.unmeasured)}")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return {
            "compared": self.compared,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "differing": self.differing,
            "first": self.first and self.first.to_dict(),
            "unexplained": self.unexplained and self.unexplained.to_dict(),
            "unseen": as_json(self.unseen),
            "unmeasured": self.unmeasured,
        }


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two files of ``record_run``.

    Results are matched by step, direction, module, op and how often that came before; so a run in bf16 may be
    compared with one in fp32, whose casts are missing. A result may differ by what its op makes of the
    differences of its inputs, and by rounding.

    Args:
        first: a file.
        second: another.

    Raises:
        ValueError: a file does not hold a recorded run, or the two runs share no result.
    """
    ours, theirs = Run.load(Path(first)), Run.load(Path(second))
    comparison = _Comparison(ours, theirs)
    shared = len(comparison.partner)
    if not shared:
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    found = comparison.differences()
    return RunComparison(
        compared=shared,
        only_first=len(ours.records) - shared,
        only_second=len(theirs.records) - shared,
        differing=len(found),
        first=next(iter(found), None),
        unexplained=next((difference for difference in found if not difference.is_rounding), None),
        unseen={module: median(limits) for module, limits in comparison.limits.items()},
        unmeasured=dict(Counter(ours.unmeasured) | Counter(theirs.unmeasured)),
    )


class _Comparison:
    """Two runs, their results matched."""

    def __init__(self, ours: Run, theirs: Run) -> None:
        self._ours, self._theirs = ours, theirs
        keys, others = _by_place(ours.records), _by_place(theirs.records)
        # number of a record of the first run -> that of the second, in the order of the first run
        self.partner = {
            number: others[key]
            for key, number in keys.items()
            if key in others and ours.records[number].shape == theirs.records[others[key]].shape
        }
        self._measured = {number: self._difference(number, other) for number, other in self.partner.items()}
        self._of_theirs = {other: self._measured[number] for number, other in self.partner.items()}
        self.limits: dict[str, list[float]] = {}  # module -> what its forward results might differ by

    def _difference(self, number: int, other: int) -> float:
        mine, its = self._ours.records[number], self._theirs.records[other]
        held, theirs = self._ours.prints[mine.held], self._theirs.prints[its.held]
        if mine.dtype == its.dtype and held.checksum == theirs.checksum:
            return 0.0
        return held.difference(theirs)

    def differences(self) -> list[Difference]:
        """Return the results that differ, in the order of the first run."""
        found = []
        for number, other in self.partner.items():
            mine, its = self._ours.records[number], self._theirs.records[other]
            difference = self._judged(mine, its, self._measured[number])
            if mine.direction == "forward":
                self.limits.setdefault(mine.module, []).append(difference.rounding)
            if difference.relative > 0:
                found.append(difference)
        return found

    def _judged(self, mine: OpRecord, its: OpRecord, relative: float) -> Difference:
        """Compare a result, or the input of it that an op which one run alone has made too different."""
        smooth = discrete = 0.0
        for held, other in zip(mine.reads, its.reads, strict=False):
            read, theirs = self._ours.prints[held], self._theirs.prints[other]
            apart = read.difference(theirs)
            if read.is_discrete and theirs.is_discrete:
                discrete += apart
            elif not (read.is_discrete or theirs.is_discrete):
                smooth = max(smooth, apart)
                alone = self._alone(read.made_by, theirs.made_by)
                if alone and apart > (limit := self._bridged(read.made_by, theirs.made_by)):
                    return Difference(
                        first=mine, second=its, relative=apart, inputs=limit, rounding=limit, alone=alone
                    )
        eps = max(mine.eps, its.eps)
        answered = max(answer(mine, smooth + eps / 2), answer(its, smooth + eps / 2))
        limit = _SAFETY * answered + discrete + _own_rounding(mine, eps)
        limit += max(_spacing(self._ours, mine), _spacing(self._theirs, its))
        if smooth and self._ours.prints[mine.held].is_discrete:
            limit += math.sqrt(4 / max(math.prod(mine.shape), 1))  # one element may always turn
        return Difference(
            first=mine, second=its, relative=relative, inputs=max(smooth, discrete), rounding=limit
        )

    def _alone(self, ours: int, theirs: int) -> str:
        """Return the op that made an input in one run alone; empty if both runs have it."""
        if self.partner.get(ours, -1) == theirs:
            return ""
        sides = (self._theirs, theirs, self._of_theirs), (self._ours, ours, self.partner)
        for run, number, matched in sides:
            if number >= 0 and number not in matched:
                record = run.records[number]
                return f"{record.op} at {record.line}" if record.line else record.op
        return ""

    def _bridged(self, ours: int, theirs: int) -> float:
        """Return by how much an input may differ that an op made which one run alone has."""
        limits = _expected(self._ours, ours, self._measured), _expected(self._theirs, theirs, self._of_theirs)
        return _SAFETY * max(limits)


def _expected(run: Run, number: int, measured: dict[int, float], depth: int = 12) -> float:
    """Return the difference measured of a result, or what its op makes of its inputs'."""
    if number < 0:
        return 0.0
    if number in measured:
        return measured[number]
    if depth == 0:
        return math.inf
    record = run.records[number]
    makers = [run.prints[read].made_by for read in record.reads]
    inputs = max((_expected(run, maker, measured, depth - 1) for maker in makers), default=0.0)
    return float(answer(record, inputs) + record.eps + _spacing(run, record))


def answer(record: OpRecord, change: float) -> float:
    """Return by how much of its size a result changes with its inputs: a power law through two points.

    Of inputs that have nothing in common nothing follows.
    """
    if change == 0 or change >= 1:
        return math.inf if change else 0.0
    (low, high), (small, large) = NUDGES, record.answers
    if not (math.isfinite(small) and math.isfinite(large)) or small == 0:
        return math.inf if math.isinf(large) or math.isinf(small) else max(change, large)
    slope = min(max(math.log(large / small) / math.log(high / low), 0.25), 1.0)
    return max(change, float(small * (change / low) ** slope))


def _own_rounding(record: OpRecord, eps: float) -> float:
    """Return what rounding the result once, and summing in fp32, may come to."""
    elements = math.prod(record.shape) or 1
    return 0.5 * eps + _FP32_EPS * math.sqrt(max(elements, 1024)) / 4


def _spacing(run: Run, record: OpRecord) -> float:
    """Return how far the smallest numbers of fp16 are apart, by the size of the result's elements."""
    norm, elements = run.prints[record.held].norm, math.prod(record.shape)
    if record.dtype != "float16":
        return 0.0
    return float(2.0**-24 * math.sqrt(elements) / norm) if norm else math.inf


def _by_place(records: Sequence[OpRecord]) -> dict[_Key, int]:
    counts: Counter[tuple[int, str, str, str]] = Counter()
    placed = {}
    for number, record in enumerate(records):
        place = (record.step, record.direction, record.module, record.op)
        placed[(*place, counts[place])] = number
        counts[place] += 1
    return placed
