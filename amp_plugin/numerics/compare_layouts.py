"""A run of one process against a run that does the same on several ranks, or in micro-batches.

for each result of the one process, and those of all ranks at the same step, module and op:
    put the ranks' pieces together in the ways that their shapes allow: shards, partial sums, replicas
    apart = difference of the best way
    allowed = 4 * apart of the inputs + 2 * eps of the coarsest dtype
    more than allowed in every way: the layouts differ here
gradients, as the optimizer finds them, and weights before the first step have one right way: shards add up,
    and everything else is the same on all ranks

A result that reads other random numbers in the two runs says nothing, and neither does what follows from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

from amp_plugin.numerics.layout_causes import Cause, cause_in_gradient, cause_in_result
from amp_plugin.numerics.layouts import (
    MICRO_BATCHES,
    Axis,
    Combined,
    Coordinates,
    Layout,
    Piece,
)
from amp_plugin.numerics.module_names import ModuleNames
from amp_plugin.numerics.parts import Part
from amp_plugin.numerics.process_mesh import ProcessMesh
from amp_plugin.numerics.recorded import Difference, OpRecord, Run

_GROWTH = 4.0  # an op may enlarge the difference of its inputs by this factor
_AMPLIFIED, _SMALL = 300.0, 1e-3  # or by this one, as long as the result differs by no more than _SMALL
_OF_ADAM = 0.1  # Adam steps by the sign of a gradient, and rounding may change the sign of a small one
_OF_USUAL = 8  # a gradient that is this many times smaller than the usual rounding counts as 0
_FP32_SUMS = 2.0**-20  # rounding of a sum that cancels, relative to its summands
_LARGEST_KNOWN = 0.05  # larger differences of single results are not expected of gradients
_USUAL = 256  # nor are differences so much larger than rounding
# op -> a result that is this many times smaller than its inputs may be rounding alone
_CANCELS = {"sum": 4.0, "add": 4.0, "sub": 4.0, **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), 100.0)}
_EXCHANGED = 4  # times eps: rounding of what ranks exchange, perhaps more than once
_KERNEL_ERROR = 2.0  # times what rounding allows

_UNKNOWN = Part(shape=(), sums={})  # of an input whose fingerprint is all that is known

Place = tuple[int, str, str, str]  # step, direction, module, op


class _Matched(NamedTuple):
    """A result of one process, and the results of the ranks that belong to it."""

    number: int
    place: Place
    nth: int  # result of the place
    axes: tuple[Axis, ...]
    pieces: Mapping[Coordinates, tuple[int, int]]  # rank, and number of the record there


class _Limit(NamedTuple):
    """How large a difference rounding explains, relative."""

    allowed: float  # with what is known of the inputs
    usual: float  # if the inputs were as near as usual
    largest: float  # of a single result that others may have as well
    follows_random: bool  # whether an input comes from other random numbers


def _by_place(run: Run, names: ModuleNames) -> dict[Place, list[int]]:
    placed: dict[Place, list[int]] = {}
    for number, record in enumerate(run.records):
        place = (record.step, record.direction, names.of(record.module), record.op)
        placed.setdefault(place, []).append(number)
    return placed


@dataclass
class _Drift:
    """How far each result of a run is from the other run, as far as that is known; inf if it says nothing."""

    run: Run
    judged: dict[int, float] = field(default_factory=dict)
    _swept: list[float] = field(default_factory=list)

    def judge(self, number: int, difference: float) -> None:
        """Note the difference of a result that both runs have."""
        self.judged[number] = difference

    def of_inputs(self, number: int) -> float:
        """Return the largest difference among the inputs of a result."""
        return max((self._of(read.made_by) for read in self.run.records[number].reads), default=0.0)

    def _of(self, number: int) -> float:
        """Return the difference of a result; of one that this run alone has, that of its inputs."""
        if number in self.judged:
            return self.judged[number]
        while len(self._swept) <= number:
            place = len(self._swept)
            record = self.run.records[place]
            earlier = [read.made_by for read in record.reads if 0 <= read.made_by < place]
            known = [self.judged.get(made, self._swept[made]) for made in earlier]
            own = record.taken + (_EXCHANGED * record.eps if self.run.parts[place].group else 0.0)
            self._swept.append(self.judged.get(place, max(known, default=0.0) + own))
        return self._swept[number] if number >= 0 else 0.0


class _Arrival:
    """Where a result arrives that is wrong.

    What a rank computes on its way need not be part of what the one process has. An embedding whose rows are
    shared out looks up other rows, too, and masks them afterwards. So a result is only wrong if another one
    is that it arrives in, or if it arrives nowhere.

    Args:
        runs: by rank.
        matched: (rank, number of a record) -> number of the same result of the one process.
        is_equal: by number of the one process.
    """

    def __init__(
        self,
        runs: Mapping[int, Run],
        matched: Mapping[tuple[int, int], int],
        is_equal: Mapping[int, bool],
    ) -> None:
        self._runs, self._matched, self._is_equal = runs, matched, is_equal
        self._readers: dict[tuple[int, int], list[int]] = {}  # (rank, record) -> records that read it
        for rank, run in runs.items():
            for number, record in enumerate(run.records):
                for made_by in {read.made_by for read in record.reads}:
                    self._readers.setdefault((rank, made_by), []).append(number)

    def anywhere(self, pieces: Iterable[tuple[int, int]]) -> bool:
        """Return True if a result that reads these, or what is made of them, is wrong, or if none does.

        In a forward pass that is asked of the forward pass alone, which comes first.
        """
        reached = {number for rank, number in pieces for number in self._next(rank, number)}
        return not reached or not all(self._is_equal[number] for number in reached)

    def _next(self, rank: int, number: int) -> Iterator[int]:
        """Yield the next results that the one process has, too."""
        seen, left = {number}, [number]
        records = self._runs[rank].records
        while left:
            for reader in self._readers.get((rank, left.pop()), ()):
                if records[reader].direction != records[number].direction:
                    continue
                matched = self._matched.get((rank, reader))
                if matched is not None:
                    yield matched
                elif reader not in seen:
                    seen.add(reader)
                    left.append(reader)


class LayoutFindings(NamedTuple):
    """What the comparison of two layouts has found.

    Attributes:
        allowed: for each result that is compared, the difference that rounding explains.
        unexplained: what rounding does not explain, in the order of the one process.
        only_one, only_ranks: results that one of the two runs has alone.
        random: results that follow from other random numbers, and are not compared.
        axes: the dimensions of the mesh, with the micro-batches.
    """

    allowed: list[float]
    unexplained: list[Difference]
    only_one: int
    only_ranks: int
    random: int
    axes: tuple[Axis, ...]


class LayoutComparison:
    """Compare a run of one process with one of several ranks or micro-batches.

    Args:
        whole: the run of one process.
        runs: those of all ranks.
        names: turn module names of the ranks into those of the one process.
    """

    def __init__(self, whole: Run, runs: Mapping[int, Run], names: ModuleNames) -> None:
        self._whole, self._runs, self._names = whole, runs, names
        self._mesh = ProcessMesh(runs)
        self._drift = _Drift(whole)
        self._drifts = {rank: _Drift(run) for rank, run in runs.items()}
        self._largest = 0.0  # difference that is explained, so far
        self._follows_random = False
        self._numbers_of_norms: set[int] = set()  # of the one process: norms of what the ranks share out
        self._partial: dict[int, tuple[Axis, ...]] = {}  # numbers of partial sums -> over which dimensions
        # number of the one process -> whether its result is as near as if all inputs were equal
        self._is_equal: dict[int, bool] = {}

    def findings(self) -> LayoutFindings:
        """Compare everything."""
        begun, matched = list(self._begun()), self._matched
        judged = {match.number: found for match in matched if (found := self._judged(match)) is not None}
        arrives = _Arrival(self._runs, self._theirs, self._is_equal)
        unexplained = [
            judged[match.number]
            for match in matched
            if match.number in judged and not judged[match.number].is_rounding
            if match.number in self._whole.gradients
            or self._is_equal[match.number]
            or arrives.anywhere(match.pieces.values())
        ]
        return LayoutFindings(
            allowed=[found.allowed for found in judged.values()],
            unexplained=[*begun, *unexplained],
            only_one=len(self._whole.records) - len(matched),
            only_ranks=sum(len(run.records) for run in self._runs.values()) - len(self._theirs),
            random=len(matched) - len(judged),
            axes=self._axes(self.micro_batches),
        )

    def _axes(self, repeats: int) -> tuple[Axis, ...]:
        return (*self._mesh.axes, *([Axis(MICRO_BATCHES, repeats)] if repeats > 1 else []))

    # Which results belong together

    @cached_property
    def _placed(self) -> tuple[dict[Place, list[int]], dict[int, dict[Place, list[int]]]]:
        theirs = {rank: _by_place(run, self._names) for rank, run in self._runs.items()}
        return _by_place(self._whole, ModuleNames()), theirs

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches of each rank make one batch of the one process."""
        mine, theirs = self._placed
        ratios: Counter[int] = Counter()
        for place, numbers in mine.items():
            if place[1] == "forward" and place[2]:
                for placed in theirs.values():
                    count, rest = divmod(len(placed.get(place, ())), len(numbers))
                    ratios[count if not rest else 0] += count > 0
        del ratios[0]
        return max(ratios, key=lambda ratio: ratios[ratio]) if ratios else 1

    @cached_property
    def _at(self) -> dict[tuple[Place, int], _Matched]:
        """The results by their place, and how often that came before."""
        return {(match.place, match.nth): match for match in self._matched}

    @cached_property
    def _theirs(self) -> dict[tuple[int, int], int]:
        """The results of the ranks, by rank and number -> number of the one process."""
        return {entry: match.number for match in self._matched for entry in match.pieces.values()}

    @cached_property
    def _matched(self) -> list[_Matched]:
        """The results that belong together, in the order of the one process."""
        mine, theirs = self._placed
        found = [
            match
            for place, numbers in mine.items()
            for match in self._matched_at(
                place, numbers, {rank: all_[place] for rank, all_ in theirs.items() if place in all_}
            )
        ]
        return sorted(found, key=lambda match: match.number)

    def _matched_at(
        self, place: Place, mine: Sequence[int], theirs: Mapping[int, Sequence[int]]
    ) -> Iterator[_Matched]:
        for repeats in dict.fromkeys((1, self.micro_batches)):
            chosen = self._alike(mine, theirs, repeats)
            if chosen is None:
                continue
            numbers, others = chosen
            for index, number in enumerate(numbers):
                pieces = {
                    (*self._mesh.place(rank), *([micro] if repeats > 1 else [])): (
                        rank,
                        records[micro * len(numbers) + index],
                    )
                    for rank, records in others.items()
                    for micro in range(repeats)
                }
                match = _Matched(number, place, index, self._axes(repeats), pieces)
                part = self._whole.parts[number]
                is_constant = part.is_made and not part.is_random  # such as the places of a shard
                if not is_constant and self._layout(match).is_comparable:
                    yield match
            return

    def _alike(
        self, mine: Sequence[int], theirs: Mapping[int, Sequence[int]], repeats: int
    ) -> tuple[Sequence[int], Mapping[int, Sequence[int]]] | None:
        """Return results of which each rank has as many as it must; if need be, leave out other shapes."""

        def counts_agree(mine: Sequence[int], theirs: Mapping[int, Sequence[int]]) -> bool:
            return bool(mine and theirs) and all(
                len(numbers) == repeats * len(mine) for numbers in theirs.values()
            )

        if counts_agree(mine, theirs):
            return mine, theirs
        shapes = [self._whole.parts[number].shape for number in mine]
        fitting = {
            rank: [
                number
                for number in numbers
                if any(_may_be_part(self._runs[rank].parts[number].shape, shape) for shape in shapes)
            ]
            for rank, numbers in theirs.items()
        }
        own = [
            number
            for number, shape in zip(mine, shapes, strict=True)
            if any(
                _may_be_part(self._runs[rank].parts[other].shape, shape)
                for rank, numbers in fitting.items()
                for other in numbers
            )
        ]
        return (own, fitting) if counts_agree(own, fitting) else None

    def _layout(self, match: _Matched) -> Layout:
        whole = Piece(self._whole.records[match.number].held, self._whole.parts[match.number])
        pieces = {
            place: Piece(self._runs[rank].records[number].held, self._runs[rank].parts[number])
            for place, (rank, number) in match.pieces.items()
        }
        return Layout(whole=whole, pieces=pieces, axes=match.axes)

    # How far they are apart

    def _begun(self) -> Iterator[Difference]:
        """Yield the weights with which the two runs do not begin alike."""
        for name, weight in self._whole.begun.items():
            pieces = {
                self._mesh.place(rank): run.begun[other]
                for rank, run in self._runs.items()
                for other in run.begun
                if self._names.of(other) == name
            }
            layout = Layout(
                whole=Piece(weight.held, weight.part),
                pieces={place: Piece(record.held, record.part) for place, record in pieces.items()},
                axes=self._mesh.axes,
            )
            if not pieces or not layout.is_comparable:
                continue
            dtypes = [weight.dtype, *(record.dtype for record in pieces.values())]
            slack = 2 * max(_EPS.get(dtype, 2.0**-10) for dtype in dtypes)
            best = min(layout.strict_ways(), key=lambda way: way.relative, default=None)
            if best is None or best.relative <= slack:
                continue
            module, _, own_name = name.rpartition(".")
            cause = cause_in_gradient(layout, best, slack)
            yield Difference(
                result=f"weight {own_name}{f' in {module}' if module else ''}, before the first step",
                op=f"weight {own_name}",
                module=module,
                relative=best.relative,
                allowed=slack,
                reason=cause.text or "the runs begin with other weights",
                ranks=self._ranks_of(layout, best, slack),
                mesh=tuple(axis.name for axis in cause.axes),
            )

    def _judged(self, match: _Matched) -> Difference | None:
        """Compare one result; None if it follows from other random numbers."""
        layout, limit = self._layout(match), self._limit(match)
        best, is_rounding = self._best(match, layout, limit)
        if not layout.cut:
            self._partial[match.number] = best.added
        self._is_equal[match.number] = best.relative <= limit.usual * best.condition
        if not is_rounding and (limit.follows_random or layout.whole.part.is_random):
            self._follows_random = True
            self._note(match, math.inf)
            return None
        if is_rounding and best.relative <= limit.largest:
            self._largest = max(self._largest, best.relative)
        self._note(match, best.relative if math.isfinite(best.relative) else 1.0)
        found = self._difference(match, best, limit.allowed, is_rounding=is_rounding)
        return found if found.is_rounding else self._explained(found, match, layout, best, limit.allowed)

    def _limit(self, match: _Matched) -> _Limit:
        """Return how large a difference rounding explains."""
        mine, theirs = self._records(match)
        inputs = self._inputs(match)
        slack = 2 * max(mine.eps, *(record.eps for record in theirs))
        if match.number in self._whole.gradients:
            # What the ranks exchange must not round more than the passes of the one process do.
            taken = self._whole.parts[match.number].rounding
            noise = self._noise_of_gradients[mine.step] / mine.held.norm if mine.held.norm else 0.0
        else:
            noise = 0.0
            if mine.direction == "forward" and not mine.module and mine.held.norm:  # such as a clip
                noise = self._noise_of_gradients.get(mine.step, 0.0) / mine.held.norm
            taken = mine.taken + max(record.taken for record in theirs)
        known = self._largest if math.isinf(inputs) else inputs
        # One element of whole numbers may always turn.
        turned = math.sqrt(4 / max(math.prod(mine.shape), 1)) if mine.held.is_discrete and known else 0.0

        def allowed(inputs: float) -> float:
            small = min(_AMPLIFIED * inputs, _SMALL)
            if mine.base == "addcdiv":  # Adam divides small elements by small ones
                small = max(small, min(math.sqrt(inputs), _OF_ADAM))
            return _GROWTH * (inputs + taken) + small + slack + _of_cancelled(mine, inputs) + noise + turned

        return _Limit(
            allowed=allowed(known),
            usual=allowed(self._largest),
            largest=min(_LARGEST_KNOWN, _USUAL * slack),
            follows_random=math.isinf(inputs),
        )

    @cached_property
    def _usual_rounding(self) -> float:
        """The rounding of a gradient of the one process, relative, the median."""
        return median([self._whole.parts[number].rounding for number in self._whole.gradients] or [0.0])

    @cached_property
    def _noise_of_gradients(self) -> dict[int, float]:
        """How large a gradient of each step may be by rounding alone, if its terms cancel.

        The gradient of the bias of attention's keys is 0 but for rounding.
        """
        numbers = self._whole.gradients
        largest: dict[int, float] = {}
        for record in map(self._whole.records.__getitem__, numbers):
            largest[record.step] = max(largest.get(record.step, 0.0), record.held.norm)
        return {
            step: (4 * _FP32_SUMS + self._usual_rounding / _OF_USUAL) * norm for step, norm in largest.items()
        }

    def _records(self, match: _Matched) -> tuple[OpRecord, list[OpRecord]]:
        theirs = [self._runs[rank].records[number] for rank, number in match.pieces.values()]
        return self._whole.records[match.number], theirs

    def _difference(
        self, match: _Matched, best: Combined, allowed: float, *, is_rounding: bool
    ) -> Difference:
        mine, theirs = self._records(match)
        reason = _kernel_reason(mine, theirs) if is_rounding else ""
        return Difference(
            result=f"{mine}",
            op=mine.op,
            module=mine.module,
            line=theirs[0].line or mine.line,
            relative=best.relative,
            allowed=allowed * best.condition,
            reason=reason,
            is_rounding=is_rounding and not reason,
            ranks=tuple(sorted({rank for rank, _ in match.pieces.values()})),
        )

    def _inputs(self, match: _Matched) -> float:
        """Return how far the inputs are apart. Of a gradient they are not known: what is usual counts."""
        if match.number in self._whole.gradients:
            return math.inf if self._follows_random else self._largest
        of_ranks = [self._drifts[rank].of_inputs(number) for rank, number in match.pieces.values()]
        # A clip reads gradients from DDP's buckets, whose exchange is not recorded.
        mine, _ = self._records(match)
        is_unknown = mine.direction == "forward" and not mine.module
        unknown = max(self._largest, self._usual_rounding) if is_unknown else 0.0
        return max(self._drift.of_inputs(match.number), unknown, *of_ranks)

    def _note(self, match: _Matched, difference: float) -> None:
        self._drift.judge(match.number, difference)
        for rank, number in match.pieces.values():
            self._drifts[rank].judge(number, difference)

    def _best(self, match: _Matched, layout: Layout, limit: _Limit) -> tuple[Combined, bool]:
        """Return the plainest way to combine the pieces, else the nearest, and if rounding explains it."""
        if match.number in self._whole.gradients:
            ways = list(layout.strict_ways())
        else:
            record = self._whole.records[match.number]
            are_means = math.prod(layout.whole.part.shape) == 1 or "mean" in record.op
            found = layout.ways(are_means=are_means, are_backward=record.direction == "backward")
            ways = [*found, *self._norms(match, layout)]
        ways = ways or list(layout.ways())
        for way in ways:
            if way.relative <= min(limit.usual, limit.allowed) * way.condition:
                return way, True
        nearest = min(ways, key=lambda way: way.relative)
        return nearest, nearest.relative <= limit.allowed * nearest.condition

    def _norms(self, match: _Matched, layout: Layout) -> Iterator[Combined]:
        """Yield norms and extremes of what the ranks share out: each rank has that of its part."""
        record = self._whole.records[match.number]
        follows = any(read.made_by in self._numbers_of_norms for read in record.reads)
        if "norm" in record.op or follows:
            norm = layout.reduced(lambda values: math.hypot(*values))
            if norm is not None:
                self._numbers_of_norms.add(match.number)
                yield norm
        for word, extreme in (("max", max), ("min", min)):
            if word in record.op and (found := layout.reduced(extreme)) is not None:
                yield found

    # What is known of a difference

    def _explained(
        self, found: Difference, match: _Matched, layout: Layout, best: Combined, allowed: float
    ) -> Difference:
        if match.number in self._whole.gradients:
            makers = {(rank, self._runs[rank].parts[number].maker) for rank, number in match.pieces.values()}
            exchanges = self._exchanged_since_right(makers)
            coarsest = max((record.eps for record, _ in exchanges), default=0.0)
            is_coarse = coarsest > self._whole.records[match.number].eps
            cause = cause_in_gradient(layout, best, allowed, coarsest if is_coarse else 0.0)
            groups = {group for record, group in exchanges if not cause.is_coarse or record.eps == coarsest}
            cause = cause.within([self._mesh.axes_of(groups)])
        else:
            cause = (
                self._cause_in_inputs(match)
                or cause_in_result(layout, best, allowed)
                or self._unknown_cause(match, layout.differing_axes(allowed) or layout.axes)
            )
        return replace(
            found,
            reason=found.reason or cause.text,
            ranks=self._ranks_of(layout, best, allowed),
            mesh=tuple(axis.name for axis in cause.axes),
        )

    # Along which dimensions of the mesh a difference may arise

    def _unknown_cause(self, match: _Matched, axes: tuple[Axis, ...]) -> Cause:
        clues = [self._partial_inputs(match), self._newly_differing(match), self._exchanged_before(match)]
        return Cause(self._made_alone(match), axes, is_known=False).within(clues)

    def _partial_inputs(self, match: _Matched) -> tuple[Axis, ...]:
        """Return the dimensions over which inputs are partial sums, though the op is not linear in them."""
        found: set[Axis] = set()
        for rank, number in match.pieces.values():
            record = self._runs[rank].records[number]
            # A quotient may be a partial sum of what is divided.
            for read in record.reads[-1:] if record.base == "div" else record.reads:
                found.update(self._partial.get(self._theirs.get((rank, read.made_by), -1), ()))
        return tuple(found)

    def _newly_differing(self, match: _Matched) -> tuple[Axis, ...]:
        """Return the dimensions along which an input differs that was the same in the step before."""
        step, direction, module, op = match.place
        before = self._at.get(((step - 1, direction, module, op), match.nth))
        if before is None:
            return ()
        now, then = self._differing_inputs(match), self._differing_inputs(before)
        return tuple({axis for own, earlier in zip(now, then, strict=False) for axis in own - earlier})

    def _differing_inputs(self, match: _Matched) -> list[set[Axis]]:
        """Return along which dimensions each input differs."""
        reads = {
            place: self._runs[rank].records[number].reads for place, (rank, number) in match.pieces.items()
        }
        count = min(map(len, reads.values()))
        eps = self._whole.records[match.number].eps
        found = []
        for index in range(count):
            pieces = {place: Piece(own[index], _UNKNOWN) for place, own in reads.items()}
            layout = Layout(whole=next(iter(pieces.values())), pieces=pieces, axes=match.axes)
            found.append(set(layout.differing_axes(8 * eps)))
        return found

    def _exchanged_before(self, match: _Matched) -> tuple[Axis, ...]:
        """Return the dimensions over which anything was exchanged before a result."""
        groups = {
            self._runs[rank].parts[earlier].group
            for rank, number in match.pieces.values()
            for earlier in range(number)
        }
        return self._mesh.axes_of(groups)

    def _exchanged_since_right(
        self, results: Iterable[tuple[int, int]]
    ) -> list[tuple[OpRecord, tuple[int, ...]]]:
        """Return by which collectives results came since they were last right, and between which ranks.

        Args:
            results: rank and number of each.
        """
        exchanges = []
        seen, left = set[tuple[int, int]](), list(results)
        while left:
            rank, number = left.pop()
            if number < 0 or (rank, number) in seen or self._is_right(rank, number):
                continue
            seen.add((rank, number))
            run = self._runs[rank]
            left += [(rank, read.made_by) for read in run.records[number].reads]
            if run.parts[number].group:
                exchanges.append((run.records[number], run.parts[number].group))
        return exchanges

    def _cause_in_inputs(self, match: _Matched) -> Cause | None:
        """Return what is wrong with an input that all ranks should have alike; None if nothing is known."""
        mine, theirs = self._records(match)
        for index, read in enumerate(mine.reads):
            if any(len(record.reads) <= index for record in theirs):
                return None
            pieces = {
                place: Piece(self._runs[rank].records[number].reads[index], _UNKNOWN)
                for place, (rank, number) in match.pieces.items()
            }
            layout = Layout(whole=Piece(read, _UNKNOWN), pieces=pieces, axes=match.axes)
            plain = layout.combined((), 1.0, ())
            limit = self._limit(match).usual
            if not layout.is_comparable or plain.relative <= limit:
                continue
            cause = cause_in_gradient(layout, plain, limit)
            if cause.is_known:
                makers = {
                    (rank, self._runs[rank].records[number].reads[index].made_by)
                    for rank, number in match.pieces.values()
                }
                groups = {group for _, group in self._exchanged_since_right(makers)}
                cause = cause.within([self._mesh.axes_of(groups)]) if "times" in cause.text else cause
                return cause._replace(text=f"an input is wrong: {cause.text}")
        return None

    def _is_right(self, rank: int, number: int) -> bool:
        matched = self._theirs.get((rank, number))
        return matched is not None and self._is_equal.get(matched, False)

    def _made_alone(self, match: _Matched) -> str:
        """Return the op of the ranks alone that made an input, in words; empty if there is none."""
        for rank, number in match.pieces.values():
            records = self._runs[rank].records
            for read in records[number].reads:
                if read.made_by >= 0 and read.made_by not in self._drifts[rank].judged:
                    return f"an input comes from {records[read.made_by]}, which the ranks alone have"
        return ""

    def _ranks_of(self, layout: Layout, best: Combined, allowed: float) -> tuple[int, ...]:
        """Return the ranks whose replicas are not right; all ranks if the pieces are added."""
        number = len(self._mesh.axes)
        wrong = {place for place, apart in best.unlike.items() if apart > allowed * best.condition}
        places = wrong if not best.added and wrong else set(layout.pieces)
        return tuple(sorted({self._mesh.ranks[place[:number]] for place in places}))


def _may_be_part(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) == len(whole) and all(mine <= size for mine, size in zip(shape, whole, strict=True))


_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def _of_cancelled(record: OpRecord, inputs: float) -> float:
    """Return what rounding leaves of a sum whose terms cancel, relative to the result; else 0."""
    sizes = sorted(read.norm for read in record.reads if not read.is_discrete)
    if record.base not in _CANCELS or not sizes or not record.held.norm:
        return 0.0
    size = max(sizes[-1], math.prod(sizes[-2:]) if "mm" in record.base else 0.0)
    larger = size / record.held.norm
    return (_FP32_SUMS + _GROWTH * inputs) * larger if larger > _CANCELS[record.base] else 0.0


def _kernel_reason(mine: OpRecord, theirs: Sequence[OpRecord]) -> str:
    low, high = sorted((mine.excess, max(record.excess for record in theirs)))
    if high > _KERNEL_ERROR and low <= 1:
        return f"the op's own error is {high:.2g} times what rounding allows, in one run alone"
    return ""
