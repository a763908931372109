"""The contents of a recording (results of ops, gradients and weights) and its file format."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from amp_plugin.numerics.finding import laid_out
from amp_plugin.numerics.parts import Axis, Part
from amp_plugin.numerics.values import Fingerprint

FORMAT = "amp_plugin run 8"
_FORMAT_OF_RESULTS_ALONE = "amp_plugin run 5"  # files in this format contain no weights or gradients
_OF_EARLIER_RELEASES = "amp_plugin.numerics.compare."  # OpRecord was in this module in earlier releases


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that differs between two runs of a program."""

    result: str  # a description of the result
    op: str  # the op that made the result
    module: str = ""  # the path of the module; empty outside modules
    line: str = ""  # the line of the program that calls the op; empty if unknown
    relative: float  # the relative difference; recorded runs are compared by their unrounded results
    allowed: float  # the largest difference that rounding can cause
    reason: str = ""  # what else is known about the difference
    is_rounding: bool = False  # whether rounding can explain the difference
    ranks: tuple[int, ...] = ()  # the ranks on which the result differs; empty for a single process
    mesh: tuple[str, ...] = ()  # the dimensions of the device mesh along which the difference arises

    def __str__(self) -> str:
        explains = "explains it" if self.is_rounding else "does not explain it"
        difference = f"{self.relative:.2g}, relative; rounding {explains} (limit: {self.allowed:.2g})"
        known = [
            ("rank" if len(self.ranks) == 1 else "ranks", listed_ranks(self.ranks)),
            ("mesh", " or ".join(self.mesh)),
            ("op", self.op),
            ("line", self.line),
            ("reason", self.reason),
            ("difference", difference),
        ]
        return laid_out(self.result, [row for row in known if row[1]])


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One result of one op."""

    step: int  # the number of optimizer steps before the op
    direction: str  # "forward" or "backward"
    module: str  # the path of the module; empty outside modules
    op: str  # the full name of the op
    line: str  # the line that called the op or, in a backward pass, its forward op; empty if unknown
    dtype: str  # the dtype of the result
    shape: tuple[int, ...]  # the shape of the result
    checksum: int  # a checksum of the result's bits
    held: Fingerprint  # the fingerprint of the result that a run without rounding would give
    reads: tuple[Fingerprint, ...]  # the fingerprints of the inputs in a run without rounding
    eps: float  # the eps of the coarsest dtype that the result or an input has
    excess: float  # the op's own error, divided by the largest error that rounding can cause
    taken: float  # if the result was taken as exact, the rounding error of its inputs; otherwise 0

    @property
    def base(self) -> str:
        """The name of the plain op: ``"add"`` of ``"aten::add_.Tensor"``."""
        return self.op.split("::")[-1].split(".")[0].rstrip("_")

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


class Weight(NamedTuple):
    """A weight before its first step."""

    dtype: str
    held: Fingerprint
    part: Part
    is_constant: bool  # whether all elements have the same value


class Compared(NamedTuple):
    """The result of comparing two recordings."""

    # For each result that both runs have, the largest difference that rounding can cause.
    allowed: list[float]
    only_first: int  # the number of results that only the first run has
    only_second: int
    differing: list[tuple[int, Difference]]  # (index of the result in the first recording, difference)
    random: int = 0  # the number of results that are not compared, because random numbers differ
    axes: tuple[Axis, ...] = ()  # the mesh dimensions if only one of the runs had several ranks


class Run(NamedTuple):
    """A recorded run of one process."""

    records: list[OpRecord]  # the results, in the order of the ops
    unmeasured: dict[str, int]  # how often each op that could not run in fp64 was called
    weights: dict[str, Weight]  # maps the name of a weight to the weight before its first step
    gradients: dict[int, str]  # maps the index of each recorded gradient to the name of its weight
    is_whole: bool = True  # whether the recorded region ended without an error
    # Maps the index of a recorded result to the rank's part of it. Empty in files of earlier releases.
    parts: dict[int, Part] = {}  # noqa: RUF012 - each recorder gives its own
    mesh: dict[Axis, int] = {}  # noqa: RUF012 - the rank's place on each dimension; empty without DTensors

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a recording safely, without unpickling unknown classes. Any other file raises a ValueError."""
        kept, reason = None, None
        known = [OpRecord, Fingerprint, Weight, Part, Axis]
        moved = [(OpRecord, f"{_OF_EARLIER_RELEASES}OpRecord")]
        with torch.serialization.safe_globals([*known, *moved]):
            try:
                kept = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                reason = error
        match kept:
            case (found, *fields) if found == FORMAT:
                return cls(*fields)
            case (found, records, unmeasured) if found == _FORMAT_OF_RESULTS_ALONE:
                return cls(records, unmeasured, {}, {})
        msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save run.amp train.py"
        raise ValueError(msg) from reason

    @property
    def steps(self) -> int:
        """The number of optimizer steps that the run has begun."""
        return max((record.step + 1 for record in self.records), default=0)

    def gradient_records(self) -> dict[tuple[int, str, int], OpRecord]:
        """Map (step, name of a weight, index of the gradient) to the record of the gradient.

        The index counts the gradients of a weight within one step, starting at 0.
        """
        counts: Counter[tuple[int, str]] = Counter()
        found = {}
        for number, name in self.gradients.items():
            record = self.records[number]
            found[record.step, name, counts[record.step, name]] = record
            counts[record.step, name] += 1
        return found


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text."""
    return ", ".join(map(str, ranks))


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``"rank 1"``, ``"ranks 0, 1"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed_ranks(ranks)}"
