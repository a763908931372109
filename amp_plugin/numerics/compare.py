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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from amp_plugin.numerics.op import listed
from amp_plugin.numerics.record import OpRecord, Run
from amp_plugin.numerics.values import as_json

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
    def is_equal(self) -> bool:
        """Whether the results have the same bits."""
        return (self.first.dtype, self.first.checksum) == (self.second.dtype, self.second.checksum)

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
            f"rounding    {self.first.rounding:.2g} in one run, {self.second.rounding:.2g} in the other",
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
    keys, others = _by_place(ours.records), _by_place(theirs.records)
    shared = {number: others[key] for key, number in keys.items() if key in others}
    if not shared:
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    alone = [
        {number: record for number, record in enumerate(run.records) if number not in matched}
        for run, matched in ((ours, shared.keys()), (theirs, set(shared.values())))
    ]
    judged: list[Difference] = []
    largest = 0.0  # difference that is explained, so far
    for number, other in shared.items():
        judged.append(_judged(ours.records[number], theirs.records[other], alone, largest))
        if judged[-1].is_rounding:
            largest = max(largest, judged[-1].relative)
    differing = [found for found in judged if not found.is_equal]
    return RunComparison(
        compared=len(shared),
        only_first=len(alone[0]),
        only_second=len(alone[1]),
        differing=len(differing),
        first=next(iter(differing), None),
        unexplained=next((found for found in differing if not found.is_rounding), None),
        unseen=median(found.allowed for found in judged),
        unmeasured=dict(Counter(ours.unmeasured) | Counter(theirs.unmeasured)),
    )


def _judged(
    mine: OpRecord, its: OpRecord, alone: Sequence[Mapping[int, OpRecord]], largest: float
) -> Difference:
    """Compare a result, or the input of it that an op which one run alone has made too different."""
    slack, inputs = 2 * max(mine.eps, its.eps), 0.0
    for read, other in zip(mine.reads, its.reads, strict=False):
        apart, allowed = read.difference(other), _GROWTH * largest + slack
        maker = alone[0].get(read.made_by) or alone[1].get(other.made_by)
        if maker is not None and apart > allowed:
            by = f"{maker.op} at {maker.line}" if maker.line else maker.op
            return Difference(
                first=mine, second=its, relative=apart, inputs=largest, allowed=allowed, alone=by
            )
        inputs = max(inputs, apart)
    allowed = _GROWTH * (inputs + mine.taken + its.taken) + slack
    if inputs and mine.held.is_discrete:
        allowed += math.sqrt(4 / max(math.prod(mine.shape), 1))  # one element may always turn
    relative = mine.held.difference(its.held)
    return Difference(first=mine, second=its, relative=relative, inputs=inputs, allowed=allowed)


def _by_place(records: Sequence[OpRecord]) -> dict[tuple[object, ...], int]:
    counts: Counter[tuple[object, ...]] = Counter()
    placed: dict[tuple[object, ...], int] = {}
    for number, record in enumerate(records):
        place = (record.step, record.direction, record.module, record.op)
        placed[(*place, counts[place], record.shape)] = number
        counts[place] += 1
    return placed
