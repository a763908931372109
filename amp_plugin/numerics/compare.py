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

from amp_plugin.numerics.record import NUDGES, OpRecord, Read, Run

_Key = tuple[int, str, str, str, int]

_SAFETY = 1.5
_FP32_EPS = 2.0**-23


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that two runs do not share.

    Attributes:
        first, second: the results.
        relative: the difference, as ``Fingerprint.difference`` says.
        inputs: the largest difference among the op's inputs.
        rounding: what the inputs' differences and rounding may come to.
        alone: the op that one run alone has, if an input that it made is what differs; else empty.
    """

    first: OpRecord
    second: OpRecord
    relative: float
    inputs: float
    rounding: float
    alone: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.rounding

    def __str__(self) -> str:
        dtypes = "" if self.first.dtype == self.second.dtype else f" against {self.second.dtype}"
        verdict = "rounding explains it" if self.is_rounding else "rounding does not explain it"
        line = f"\n  line        {self.first.line}" if self.first.line else ""
        alone = f"\n  its input   comes from {self.alone}, which one run alone has" if self.alone else ""
        return (
            f"{self.first}{dtypes}{line}{alone}\n  difference  {self.relative:.2g}, relative; {verdict}: "
            "inputs that "
            f"differ by {self.inputs:.2g} allow {self.rounding:.2g}"
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
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None
    unseen: dict[str, float]

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
        return "\n\n".join([*parts, f"not to be told from rounding: differences {limits}"])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return {
            "compared": self.compared,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "differing": self.differing,
            "first": _as_dict(self.first),
            "unexplained": _as_dict(self.unexplained),
            "unseen": {module: _plain(limit) for module, limit in self.unseen.items()},
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
    runs = Run.load(Path(first)), Run.load(Path(second))
    comparison = _Comparison(*runs)
    if not comparison.shared:
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    found = comparison.differences()
    return RunComparison(
        compared=len(comparison.shared),
        only_first=len(runs[0].records) - len(comparison.shared),
        only_second=len(runs[1].records) - len(comparison.shared),
        differing=len(found),
        first=next(iter(found), None),
        unexplained=next((difference for difference in found if not difference.is_rounding), None),
        unseen={module: median(limits) for module, limits in comparison.limits.items()},
    )


class _Comparison:
    """Two runs, their results matched.

    Attributes:
        shared: pairs of numbers of records, in the order of the first run.
        limits: module -> what its forward results might differ by.
    """

    def __init__(self, ours: Run, theirs: Run) -> None:
        self._ours, self._theirs = ours, theirs
        keys, others = _by_place(ours.records), _by_place(theirs.records)
        self.shared = [
            (number, others[key])
            for key, number in keys.items()
            if key in others and ours.records[number].shape == theirs.records[others[key]].shape
        ]
        self._partner = dict(self.shared)
        self._measured = {number: self._difference(number, other) for number, other in self.shared}
        self._back = {other: number for number, other in self.shared}
        self.limits: dict[str, list[float]] = {}

    def _difference(self, number: int, other: int) -> float:
        mine, its = self._ours.records[number], self._theirs.records[other]
        held, theirs = self._ours.prints[mine.held], self._theirs.prints[its.held]
        if mine.dtype == its.dtype and held.checksum == theirs.checksum:
            return 0.0
        return held.difference(theirs)

    def differences(self) -> list[Difference]:
        """Return the results that differ, in the order of the first run."""
        found = []
        for number, other in self.shared:
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
        for read, other in zip(mine.reads, its.reads, strict=False):
            apart = self._ours.prints[read.held].difference(self._theirs.prints[other.held])
            if read.is_discrete and other.is_discrete:
                discrete += apart
            elif not (read.is_discrete or other.is_discrete):
                smooth = max(smooth, apart)
                if (alone := self._alone(read, other)) and apart > (limit := self._bridged(read, other)):
                    return Difference(
                        first=mine, second=its, relative=apart, inputs=limit, rounding=limit, alone=alone
                    )
        eps = max(mine.eps, its.eps)
        answered = max(answer(mine, smooth + eps / 2), answer(its, smooth + eps / 2))
        limit = _SAFETY * answered + discrete + _own_rounding(mine, eps)
        limit += max(_spacing(self._ours, mine), _spacing(self._theirs, its))
        return Difference(
            first=mine, second=its, relative=relative, inputs=max(smooth, discrete), rounding=limit
        )

    def _alone(self, read: Read, other: Read) -> str:
        """Return the op that made an input in one run alone; empty if both runs have it."""
        if self._partner.get(read.made_by, -1) == other.made_by:
            return ""
        for run, number, matched in (
            (self._theirs, other.made_by, self._back),
            (self._ours, read.made_by, self._partner),
        ):
            if number >= 0 and number not in matched:
                record = run.records[number]
                return " at ".join(filter(None, (record.op, record.line)))
        return ""

    def _bridged(self, read: Read, other: Read) -> float:
        """Return by how much an input may differ that an op made which one run alone has."""
        ours = self._expected(self._ours, read.made_by, self._partner, lambda number: self._measured[number])
        theirs = self._expected(
            self._theirs, other.made_by, self._back, lambda number: self._measured[self._back[number]]
        )
        return _SAFETY * max(ours, theirs)

    def _expected(
        self, run: Run, number: int, matched: dict[int, int], measured: Any, depth: int = 12
    ) -> float:
        """Return the difference measured of a result, or what its op makes of its inputs'."""
        if number < 0:
            return 0.0
        if number in matched:
            return float(measured(number))
        record = run.records[number]
        if depth == 0:
            return math.inf
        inputs = [self._expected(run, read.made_by, matched, measured, depth - 1) for read in record.reads]
        return float(answer(record, max(inputs, default=0.0)) + record.eps + _spacing(run, record))


def answer(record: OpRecord, change: float) -> float:
    """Return by how much of its size a result changes with its inputs: a power law through two points.

    Args:
        record: the result.
        change: of the inputs, relative.
    """
    if change == 0:
        return 0.0
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


def _as_dict(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "op": difference.first.op,
        "module": difference.first.module,
        "direction": difference.first.direction,
        "step": difference.first.step,
        "line": difference.first.line,
        "dtypes": [difference.first.dtype, difference.second.dtype],
        "relative": _plain(difference.relative),
        "inputs": _plain(difference.inputs),
        "rounding": _plain(difference.rounding),
        "alone": difference.alone,
        "is_rounding": difference.is_rounding,
    }


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
