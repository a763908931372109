"""Decide whether rounding explains the difference between the results of two layouts.

A recording has two facts about each result: its value without rounding, and how far rounding has moved it.
The values without rounding are compared. Between two healthy runs they differ only by rounding that they
contain nevertheless: results from other ranks, and results of ops that did not run in float64, are taken as
they are. That is a part of all rounding, and both runs round about as much. An op may amplify small
differences of its inputs. It amplified the measured rounding in the same way, so no limit depends on the op
(except for steps by sign)::

    for each result of the one process, and those of all ranks that belong to it:
        combine the ranks' pieces in the ways that their shapes allow: shards, partial sums, replicas
        apart   = difference of the best way
        usual   = 4 * rounding of the result in both runs + 2 * eps of the coarsest dtype
        allowed = usual + 4 * apart of the inputs
        if apart is more than allowed in every way, the layouts differ here

The factor 4 has two parts. Two independent errors of one size are up to twice that size apart, and another
order of sums may double an error. With it, 69 healthy runs in fp32 and bf16 were silent. Of these, 11 were
recorded after the limits had been set. All of 14 planted bugs were named (docs/lab/numerics.md).

Gradients that reach the optimizer have only one right way: shards add up, and everything else is
equal on all ranks. The ranks' exchange must not round more than the one process does. So for gradients only
the rounding in the one process counts.

If a result depends on different random numbers in the two runs, nothing can be said about it, nor about
results that follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from amp_plugin.numerics.layout_matches import Match, Matches
from amp_plugin.numerics.layouts import Combined
from amp_plugin.numerics.recorded import OpRecord, Run

_GROWTH = 4.0
_GOES_BY_SIGNS = re.compile("addcdiv|_fused_adam")
_EXCHANGED = 4  # times eps: the rounding of data that ranks exchange, perhaps more than once
_ONE = -1  # stands for the one process, in place of a rank


class Verdict(NamedTuple):
    """The verdict on one result.

    Attributes:
        best: The best way to combine the pieces.
        usual: The relative difference that rounding explains if the inputs are equal.
        allowed: The relative difference that rounding explains for the actual inputs.
        is_rounding: Whether rounding explains the difference.
        is_random: Whether the result depends on different random numbers, so that nothing can be said.
    """

    best: Combined
    usual: float
    allowed: float
    is_rounding: bool
    is_random: bool

    @property
    def is_equal(self) -> bool:
        """Whether the result is as close as if all its inputs were equal."""
        return self.best.relative <= self.usual * self.best.condition


def verdicts(matches: Matches) -> dict[int, Verdict]:
    """Return the verdicts on the results that the two runs share, by their numbers in the one process."""
    judge = _Judge(matches)
    return {match.number: judge.judged(match) for match in matches.all}


class _Judge:
    """Judges the results in the order of the one process, and keeps the difference of each."""

    def __init__(self, matches: Matches) -> None:
        self._runs: dict[int, Run] = {**matches.runs, _ONE: matches.whole}
        # Maps (rank, number of a result) to the difference of this result. inf if nothing is known of it.
        self._apart: dict[tuple[int, int], float] = {}
        # Maps a rank to the differences of results that only this rank has.
        self._swept: dict[int, list[float]] = {}
        self._follows_random = False
        # Numbers, in the run of one process, of the norms of tensors that the ranks share out.
        self._numbers_of_norms: set[int] = set()

    def judged(self, match: Match) -> Verdict:
        """Compare one result."""
        usual, inputs = self._usual(match), self._inputs(match)
        follows_random = math.isinf(inputs)
        allowed = usual if follows_random else usual + _GROWTH * inputs + _of_signs(match.mine, inputs)
        if inputs and match.mine.held.is_discrete:
            allowed += math.sqrt(4 / max(math.prod(match.mine.shape), 1))  # one element may always change
        best = self._best(match, usual, allowed)
        is_rounding = best.relative <= allowed * best.condition
        is_random = not is_rounding and (follows_random or match.layout.whole.part.is_random)
        self._follows_random |= is_random
        apart = math.inf if is_random else best.relative if math.isfinite(best.relative) else 1.0
        for entry in ((_ONE, match.number), *match.pieces.values()):
            self._apart[entry] = apart
        return Verdict(best, usual, allowed, is_rounding, is_random)

    def _usual(self, match: Match) -> float:
        mine, theirs = match.mine, match.theirs
        slack = 2 * max(mine.eps, *(record.eps for record in theirs))
        rounding = match.layout.whole.part.rounding
        if not match.is_gradient:
            rounding += max(piece.part.rounding for piece in match.layout.pieces.values())
            rounding += mine.taken + max(record.taken for record in theirs)
        return _GROWTH * rounding + slack

    def _inputs(self, match: Match) -> float:
        """Return the difference of the inputs."""
        if match.is_gradient:
            if self._follows_random:
                return math.inf
            maker = match.layout.whole.part.maker
            return self._apart_of(_ONE, maker)
        entries = ((_ONE, match.number), *match.pieces.values())
        return max(self._apart_of_inputs(rank, number) for rank, number in entries)

    def _apart_of_inputs(self, rank: int, number: int) -> float:
        reads = self._runs[rank].records[number].reads
        return max((self._apart_of(rank, read.made_by) for read in reads), default=0.0)

    def _apart_of(self, rank: int, number: int) -> float:
        """Return the difference of a result. If only this run has the result, use the inputs' difference."""
        if (rank, number) in self._apart:
            return self._apart[rank, number]
        run, swept = self._runs[rank], self._swept.setdefault(rank, [])
        while len(swept) <= number:
            place = len(swept)
            record = run.records[place]
            earlier = [read.made_by for read in record.reads if 0 <= read.made_by < place]
            known = [self._apart.get((rank, made), swept[made]) for made in earlier]
            own = record.taken + (_EXCHANGED * record.eps if run.parts[place].group else 0.0)
            swept.append(self._apart.get((rank, place), max(known, default=0.0) + own))
        return swept[number] if number >= 0 else 0.0

    def _best(self, match: Match, usual: float, allowed: float) -> Combined:
        """Return the simplest way to combine the pieces that is as close as usual, else the closest way."""
        layout = match.layout
        if match.is_gradient:
            ways = list(layout.strict_ways())
        else:
            are_means = math.prod(layout.whole.part.shape) == 1 or "mean" in match.mine.op
            found = layout.ways(are_means=are_means, are_backward=match.mine.direction == "backward")
            ways = [*found, *self._norms(match)]
        ways = ways or list(layout.ways())
        near = (way for way in ways if way.relative <= usual * way.condition)
        return next(near, None) or min(ways, key=lambda way: way.relative)

    def _norms(self, match: Match) -> Iterator[Combined]:
        """Yield norms and extremes of tensors that the ranks share. Each rank has the number for its part."""
        record, layout = match.mine, match.layout
        follows = any(read.made_by in self._numbers_of_norms for read in record.reads)
        if "norm" in record.op or follows:
            norm = layout.reduced(lambda values: math.hypot(*values))
            if norm is not None:
                self._numbers_of_norms.add(match.number)
                yield norm
        for word, extreme in (("max", max), ("min", min)):
            if word in record.op and (found := layout.reduced(extreme)) is not None:
                yield found


def _of_signs(record: OpRecord, inputs: float) -> float:
    """Return how much rounding can change an optimizer step that uses only the signs of the gradients.

    Adam and similar optimizers divide each element of a gradient by its own size. An element that is smaller
    than the gradient's rounding may have another sign in the other run. Then its step differs by twice its
    size. If a share of about ``inputs`` of the elements is that small, the whole step differs by twice the
    square root of that share.
    """
    if not _GOES_BY_SIGNS.search(record.op) or not record.held.norm or math.isinf(inputs):
        return 0.0
    # Among the inputs, the weight before the step is closest to the weight after it.
    step = min(math.dist(read.sketch, record.held.sketch) for read in record.reads)
    return _GROWTH * 2 * math.sqrt(inputs) * step / record.held.norm
