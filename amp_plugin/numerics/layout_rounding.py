"""Decide whether rounding explains the difference between the results of two layouts.

A recording contains two things for each result: the value that the result would have if no op rounded, and
the measured rounding error of the result. The comparison uses the values that the results would have if no op
rounded. In two correct runs, these values still differ a little, because data from other ranks and results of
ops that did not run in float64 contain rounding errors. The difference between two correct runs should not
exceed the measured rounding error, which is about equal in both runs. An op may amplify a small difference
between the inputs of the two runs, but it amplifies the measured rounding error as well. The limit is
therefore the same for all ops, except for optimizer steps that use the signs of the gradients.

::

    for each result of the single-process run and its matching results on the ranks:

        combine the ranks' pieces as shards, partial sums or replicas, in all ways that their shapes allow

        apart = the relative difference between the combined pieces and the single-process result

        usual = 4 * measured rounding of the result in both runs + 2 * eps of the coarsest dtype

        allowed = usual + 4 * the value of ``apart`` for the inputs

        if ``apart`` is more than ``allowed`` for every way to combine the pieces, the two runs differ here

The factor 4 is 2 * 2. Two independent errors of the same size differ by up to twice that size, and summing in
another order may double an error. With a factor of 4, none of 69 comparisons of correct runs in fp32 or bf16
reported a difference. Of the 69 compared runs, 11 were recorded after the limits had been set. All 14 bugs
that had been planted in programs were found (docs/lab/numerics.md).

There is only one right way to combine gradients that reach the optimizer. The shards of a gradient must make
up the whole gradient. Along each mesh dimension over which a gradient is not sharded, the ranks must have
equal gradients. A gradient that was reduced in a coarser dtype should be reported. The tolerance for
gradients therefore covers only the rounding errors of the single-process run.

A result is not judged if the two runs drew different random numbers for it, or if it is computed from a
result that is not judged.
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
_EXCHANGED = 4  # data from other ranks may be rounded several times, by this many eps in total
_ONE = -1  # stands for the single-process run where a rank is expected


class Verdict(NamedTuple):
    """A verdict on whether rounding explains how a result differs between the two runs.

    Attributes:
        best: The simplest way to combine the ranks' pieces into a result that is close enough to the
            single-process result. If no way of combining the pieces is close enough, ``best`` is the
            closest one.
        usual: The largest relative difference that rounding would explain if the inputs were equal in both
            runs.
        allowed: The largest relative difference that rounding can cause, given how much the inputs differ.
        is_random: True if the two runs drew different random numbers for the result. Then the result is not
            judged.
    """

    best: Combined
    usual: float
    allowed: float
    is_random: bool

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.best.relative <= self.allowed * self.best.condition

    @property
    def is_equal(self) -> bool:
        """Whether the difference is so small that rounding would explain it even if the inputs were equal."""
        return self.best.relative <= self.usual * self.best.condition


def verdicts(matches: Matches) -> dict[int, Verdict]:
    """Map the index of each matched result in the single-process run to its verdict."""
    judge = _Judge(matches)
    return {match.number: judge.judged(match) for match in matches.all}


class _Judge:
    """Judges results in the order in which the single process computed them, and stores their differences."""

    def __init__(self, matches: Matches) -> None:
        self._runs: dict[int, Run] = {**matches.runs, _ONE: matches.whole}
        # Maps (rank, index of a result) to the relative difference of this result; inf if it is not known.
        self._apart: dict[tuple[int, int], float] = {}
        # Maps a rank to estimates of how much each of its results would differ between the two runs.
        # The estimates are used for results that only one of the two runs has.
        self._swept: dict[int, list[float]] = {}
        self._follows_random = False
        # The indices of single-process results that are norms of tensors split over the ranks.
        self._numbers_of_norms: set[int] = set()

    def judged(self, match: Match) -> Verdict:
        """Compare one result of the two runs."""
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
        return Verdict(best, usual, allowed, is_random)

    def _usual(self, match: Match) -> float:
        mine, theirs = match.mine, match.theirs
        slack = 2 * max(mine.eps, *(record.eps for record in theirs))
        rounding = match.layout.whole.part.rounding
        if not match.is_gradient:
            rounding += max(piece.part.rounding for piece in match.layout.pieces.values())
            rounding += mine.taken + max(record.taken for record in theirs)
        return _GROWTH * rounding + slack

    def _inputs(self, match: Match) -> float:
        """For the inputs of a result, return the largest difference between the two runs."""
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
        """Return how much a result differs between the two runs.

        If the result exists in only one run, use the differences of its inputs to estimate how much it would
        differ.
        """
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
        """Return the first way to combine the pieces that gives a result close to the single-process result.

        The relative difference from the single-process result must be at most ``usual``. If every way of
        combining the pieces gives a larger difference, return the way with the smallest difference.
        """
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
        """Compute the norm, maximum or minimum of a split tensor from those of its parts, and yield it."""
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

    Adam and similar optimizers divide each element of a gradient by the element's own magnitude. An element
    that is smaller than the gradient's rounding error may have the opposite sign in the other run. The
    flipped sign changes this element's step by twice the step's size. If ``inputs`` is the fraction of
    elements whose sign differs between the two runs, the optimizer steps of the runs differ by 2 *
    sqrt(inputs), relative to the norm of one step.
    """
    if not _GOES_BY_SIGNS.search(record.op) or not record.held.norm or math.isinf(inputs):
        return 0.0
    # Among the inputs of the optimizer's op, the input closest to the result is the weight before the step.
    step = min(math.dist(read.sketch, record.held.sketch) for read in record.reads)
    return _GROWTH * 2 * math.sqrt(inputs) * step / record.held.norm
