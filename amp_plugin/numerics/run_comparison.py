"""Two recorded runs: where they differ first, and whether rounding explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amp_plugin.numerics.recorded_run import OpRecord, load_records

_Key = tuple[int, str, str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that two runs do not share.

    Attributes:
        first, second: the results.
        relative: the difference, as ``Fingerprint.difference`` says.
        depth: how many results have differed so far, itself included.
        rounding: what rounding alone may come to: eps of the coarsest dtype so far times the depth.
    """

    first: OpRecord
    second: OpRecord
    relative: float
    depth: int
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.rounding

    def __str__(self) -> str:
        dtypes = "" if self.first.dtype == self.second.dtype else f" against {self.second.dtype}"
        verdict = "rounding explains it" if self.is_rounding else "rounding does not explain it"
        line = f"\n  line        {self.first.line}" if self.first.line else ""
        return (
            f"{self.first}{dtypes}{line}\n  difference  {self.relative:.2g}, relative; {verdict}: "
            f"eps times {self.depth} results that differ so far is {self.rounding:.2g}"
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
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None

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
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return {
            "compared": self.compared,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "differing": self.differing,
            "first": _as_dict(self.first),
            "unexplained": _as_dict(self.unexplained),
        }


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two files of ``record_run``.

    Results are matched by step, direction, module, op and how often that came before; so a run in bf16 may be
    compared with one in fp32, whose casts are missing. Rounding errors add up from the first difference on:
    the nth result that differs may differ by n times eps of the coarsest dtype that either run has used.

    Args:
        first: a file.
        second: another.

    Raises:
        ValueError: a file is no recorded run, or they have no result in common.
    """
    ours, theirs = _by_place(load_records(Path(first))), _by_place(load_records(Path(second)))
    shared = [key for key in ours if key in theirs and ours[key].shape == theirs[key].shape]
    if not shared:
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    differences = _differences(shared, ours, theirs)
    return RunComparison(
        compared=len(shared),
        only_first=len(ours) - len(shared),
        only_second=len(theirs) - len(shared),
        differing=len(differences),
        first=next(iter(differences), None),
        unexplained=next((difference for difference in differences if not difference.is_rounding), None),
    )


def _by_place(records: Sequence[OpRecord]) -> dict[_Key, OpRecord]:
    counts: Counter[tuple[int, str, str, str]] = Counter()
    placed = {}
    for record in records:
        place = (record.step, record.direction, record.module, record.op)
        placed[(*place, counts[place])] = record
        counts[place] += 1
    return placed


def _differences(
    shared: Sequence[_Key], ours: Mapping[_Key, OpRecord], theirs: Mapping[_Key, OpRecord]
) -> list[Difference]:
    """Return the results that differ, in the order of the first run."""
    coarsest = [_coarsest_so_far(run) for run in (ours, theirs)]
    found: list[Difference] = []
    for key in shared:
        mine, other = ours[key], theirs[key]
        is_equal = mine.dtype == other.dtype and mine.result.checksum == other.result.checksum
        relative = 0.0 if is_equal else mine.result.difference(other.result)
        if is_equal or (relative == 0 and mine.dtype != other.dtype):
            continue
        depth = len(found) + 1
        rounding = depth * max(eps[key] for eps in coarsest)
        found.append(Difference(first=mine, second=other, relative=relative, depth=depth, rounding=rounding))
    return found


def _coarsest_so_far(run: Mapping[_Key, OpRecord]) -> dict[_Key, float]:
    """Return for each result the largest eps among the dtypes of the results up to it."""
    coarsest, so_far = 0.0, {}
    for key, record in run.items():
        coarsest = max(coarsest, torch.finfo(getattr(torch, record.dtype)).eps)
        so_far[key] = coarsest
    return so_far


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
        "relative": str(difference.relative) if difference.relative == float("inf") else difference.relative,
        "rounding": difference.rounding,
        "is_rounding": difference.is_rounding,
    }
