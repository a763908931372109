"""Two recorded runs: where they differ first by more than rounding explains.

for each result that both runs have:
    apart = difference between the runs of what it would be without rounding; so of each input
    allowed = 3 * apart of the inputs + 2 * eps of the coarsest dtype
    more than allowed: the programs differ here; so they do where one run alone has an op whose result differs
    the op's own error is beyond rounding in one run alone: its kernel differs
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
from amp_plugin.numerics.record import OpRecord, Run
from amp_plugin.numerics.values import as_json

_Key = tuple[int, str, str, str, int]

_GROWTH = 3.0  # by which one op may enlarge differences that are there


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that two runs do not share."""

    first: OpRecord  # the results
    second: OpRecord
    relative: float  # the difference of what they would be without rounding, relative
    inputs: float  # the same, the largest among the op's inputs
    allowed: float  # how large it may be
    alone: str = ""  # the op that one run alone has, if an input that it made is what differs; else empty

    @property
    def excess(self) -> float:
        """The op's own error over what rounding may come to, if one run alone is beyond it; else 0."""
        low, high = sorted((self.first.excess, self.second.excess))
        return high if high > 1 >= low else 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.allowed and not self.excess

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        first, second = self.first, self.second
        place = {"op": first.op, "module": first.module, "direction": first.direction, "step": first.step}
        place |= {"line": first.line, "dtypes": [first.dtype, second.dtype], "alone": self.alone}
        numbers = {name: getattr(self, name) for name in ("relative", "inputs", "allowed", "excess")}
        rounding = [first.rounding, second.rounding]
        return {**place, **as_json({**numbers, "rounding": rounding}), "is_rounding": self.is_rounding}

    def __str__(self) -> str:
        dtypes = "" if self.first.dtype == self.second.dtype else f" against {self.second.dtype}"
        verdict = "rounding explains it" if self.is_rounding else "rounding does not explain it"
        rows = [f"line        {self.first.line}"] if self.first.line else []
        if self.alone:
            rows.append(f"its input   comes from {self.alone}, which one run alone has")
        if self.excess:
            rows.append(f"one run     the op's own error is {self.excess:.2g} times what rounding allows")
        allowed = f"inputs that differ by {self.inputs:.2g} allow {self.allowed:.2g}"
        rows += [
            f"difference  {self.relative:.2g} without rounding, relative; {verdict}: {allowed}",
            f"rounding    {self.first.rounding:.2g} in the first run, {self.second.rounding:.2g} in the second",
        ]
        return "\n  ".join([f"{self.first}{dtypes}", *rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs compared.

    Attributes:
        compared: results both runs have.
        only_first, only_second: results that one of them has, such as casts.
        differing: how many of those compared differ in a bit.
        first: the first that differs; None if none does.
        unexplained: the first that rounding does not explain; None if none is.
        unseen: the difference of a result up to which rounding explains it, the median.
        unmeasured: ops that did not run in fp64 -> how often; what they made is taken as exact.
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None
    unseen: float
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
        parts.append(f"not to be told from rounding: differences below {self.unseen:.1g} of a result")
        if self.unmeasured:
            parts.append(f"taken as exact, not measured: {listed(self.unmeasured)}")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        differences = {"first": self.first, "unexplained": self.unexplained}
        return {
            **{name: as_json(getattr(self, name)) for name in self.__slots__},
            **{name: found and found.to_dict() for name, found in differences.items()},
        }


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two files of ``record_run``.

    Results are matched by step, direction, module, op and how often that came before; so a run in bf16 may be
    compared with one in fp32, whose casts are missing. What is compared is each result without rounding: it
    may differ where the inputs do, and by twice the eps of the coarsest dtype.

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
    judged = comparison.judged()
    differing = [found for found in judged if not _are_equal(found)]
    return RunComparison(
        compared=shared,
        only_first=len(ours.records) - shared,
        only_second=len(theirs.records) - shared,
        differing=len(differing),
        first=next(iter(differing), None),
        unexplained=next((found for found in differing if not found.is_rounding), None),
        unseen=median(found.allowed for found in judged),
        unmeasured=dict(Counter(ours.unmeasured) | Counter(theirs.unmeasured)),
    )


def _are_equal(found: Difference) -> bool:
    return (found.first.dtype, found.first.checksum) == (found.second.dtype, found.second.checksum)


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
        self._largest = 0.0  # difference that is explained, so far

    def judged(self) -> list[Difference]:
        """Return all results of both runs, in the order of the first one."""
        found = []
        for number, other in self.partner.items():
            difference = self._judged(self._ours.records[number], self._theirs.records[other])
            found.append(difference)
            if difference.is_rounding:
                self._largest = max(self._largest, difference.relative)
        return found

    def _judged(self, mine: OpRecord, its: OpRecord) -> Difference:
        """Compare a result, or the input of it that an op which one run alone has made too different."""
        slack, inputs = 2 * max(mine.eps, its.eps), 0.0
        for held, other in zip(mine.reads, its.reads, strict=False):
            read, theirs = self._ours.prints[held], self._theirs.prints[other]
            apart = read.difference(theirs)
            allowed = _GROWTH * self._largest + slack
            if apart > allowed and (alone := self._alone(read.made_by, theirs.made_by)):
                return Difference(
                    first=mine, second=its, relative=apart, inputs=self._largest, allowed=allowed, alone=alone
                )
            inputs = max(inputs, apart)
        allowed = _GROWTH * (inputs + mine.taken + its.taken) + slack
        result = self._ours.prints[mine.held]
        if inputs and result.is_discrete:
            allowed += math.sqrt(4 / max(math.prod(mine.shape), 1))  # one element may always turn
        relative = result.difference(self._theirs.prints[its.held])
        return Difference(first=mine, second=its, relative=relative, inputs=inputs, allowed=allowed)

    def _alone(self, ours: int, theirs: int) -> str:
        """Return the op that made an input in one run alone; empty if both runs have it."""
        for run, number, matched in (
            (self._theirs, theirs, self.partner.values()),
            (self._ours, ours, self.partner),
        ):
            if number >= 0 and number not in matched:
                record = run.records[number]
                return f"{record.op} at {record.line}" if record.line else record.op
        return ""


def _by_place(records: Sequence[OpRecord]) -> dict[_Key, int]:
    counts: Counter[tuple[int, str, str, str]] = Counter()
    placed = {}
    for number, record in enumerate(records):
        place = (record.step, record.direction, record.module, record.op)
        placed[(*place, counts[place])] = number
        counts[place] += 1
    return placed
