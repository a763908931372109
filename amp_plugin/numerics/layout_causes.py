"""Find out why a result is wrong in a run on several ranks.

The cause may be a missing sum over the ranks, a superfluous sum, or a wrong order of the elements. First,
look for a factor, a sum over ranks or an order of the elements that would make the result right. If no
correction makes the result right, the explanation names the mesh dimensions that may be responsible. A mesh
dimension may be responsible if inputs differ along it, or if ranks exchanged data along it earlier.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from amp_plugin.numerics.layout_matches import Match, Matches
from amp_plugin.numerics.layout_rounding import Verdict
from amp_plugin.numerics.layouts import Combined, Layout, Piece
from amp_plugin.numerics.parts import Axis, Part
from amp_plugin.numerics.process_mesh import ProcessMesh
from amp_plugin.numerics.recorded import Difference, OpRecord

_UNKNOWN = Part(shape=(), sums={})  # placeholder for an input of which only the fingerprint is known
_GROWTH = 3.0  # an op may multiply the difference between the two runs by up to this factor


class Cause(NamedTuple):
    """The explanation of a difference, with the mesh dimensions along which it arises.

    Attributes:
        text: The explanation in words; empty if there is none.
        axes: The mesh dimensions along which the difference arises. If the difference is not explained,
            ``axes`` contains all mesh dimensions that may be responsible.
        is_coarse: Whether a collective in a coarser dtype explains the difference.
    """

    text: str
    axes: tuple[Axis, ...]
    is_coarse: bool = False

    def within(self, clues: Iterable[Collection[Axis]]) -> Cause:
        """Return the cause, limited to the mesh dimensions that ``clues`` also names.

        Each entry of ``clues`` holds the mesh dimensions that one observation points to, such as the
        dimensions along which an input differs. Only the first entry that contains a mesh dimension of the
        cause is used. If no entry contains a mesh dimension of the cause, the cause is returned unchanged.
        """
        for clue in clues:
            axes = tuple(axis for axis in self.axes if axis in clue)
            if axes:
                return self._replace(axes=axes)
        return self


def cause_in_gradient(layout: Layout, best: Combined, allowed: float, coarsest: float = 0.0) -> Cause:
    """Explain why a gradient or weight is wrong in the run on several ranks.

    Args:
        layout: The gradient on all ranks.
        best: The best way to combine the pieces of the gradient.
        allowed: The largest relative difference that rounding can cause.
        coarsest: The eps of the coarsest dtype that the collectives use. ``coarsest`` is 0 if this dtype is
            not coarser than the gradient's dtype.
    """
    for size, axes in _sizes(layout.axes):
        for factor, word in ((1 / size, "large"), (size, "small")):
            if layout.is_located:
                scaled = layout.located(best.added, factor)
            else:
                scaled = layout.combined(best.added, factor, layout.cut)
            if scaled.relative <= allowed * scaled.condition:
                return _times(size, word, axes)
    missing = _missing_sum(layout, best, allowed)
    if missing:
        return missing
    if layout.cut and layout.is_located:
        moved = layout.combined(best.added, 1.0, layout.cut)
        if layout.cut in layout.whole.part.sums and moved.relative <= allowed * moved.condition:
            return Cause("its parts are in the wrong order", best.added)
    if coarsest and best.relative <= (_GROWTH * coarsest + allowed) * best.condition:
        text = "the collective between the ranks uses a coarser dtype than the passes, and rounds more"
        return Cause(text, layout.axes, is_coarse=True)
    return Cause("", layout.differing_axes(allowed) or best.added or layout.axes)


def _times(size: int, word: str, axes: tuple[Axis, ...]) -> Cause:
    causes = {
        "large": "it was reduced twice, or summed instead of averaged",
        "small": "it was divided once too often",
    }
    return Cause(f"it is {size} times too {word}: {causes[word]}", axes)


def _missing_sum(layout: Layout, best: Combined, allowed: float) -> Cause | None:
    """Return the missing sum or mean over ranks that would make the result right, or None."""
    for axes in _other_subsets(layout.axes, best.added):
        added = tuple(axis for axis in layout.axes if axis in best.added or axis in axes)
        size = math.prod(axis.size for axis in axes)
        for scale, what in ((1.0, "sum"), (1 / size, "mean")):
            if layout.is_located:
                tried = layout.located(added, scale)
            else:
                tried = layout.combined(added, scale, layout.cut)
            if tried.relative <= allowed * tried.condition:
                return Cause(f"each rank has its own part: a {what} over the ranks is missing", axes)
    return None


def _other_subsets(axes: tuple[Axis, ...], added: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    left = [axis for axis in axes if axis not in added]
    for number in range(1, 2 ** len(left)):
        yield tuple(axis for place, axis in enumerate(left) if number >> place & 1)


def _sizes(axes: tuple[Axis, ...]) -> Iterator[tuple[int, tuple[Axis, ...]]]:
    """Yield each product of mesh sizes, with the mesh dimensions whose sizes give this product."""
    found: dict[int, list[Axis]] = {}
    for subset in _other_subsets(tuple(axis for axis in axes if axis.size > 1), ()):
        size = math.prod(axis.size for axis in subset)
        if len(subset) == 1 or size not in found:
            found.setdefault(size, []).extend(subset)
    yield from ((size, tuple(members)) for size, members in found.items())


def cause_in_result(layout: Layout, best: Combined, allowed: float) -> Cause | None:
    """Explain why a result is wrong in the run on several ranks. Return None if no cause is found."""
    differing = layout.differing_axes(allowed) or layout.axes
    for dim in range(len(layout.whole.part.shape)):
        dims = tuple(sorted({*layout.cut, dim}))
        if dim in layout.cut or dims not in layout.whole.part.sums:
            continue
        along = layout.combined(best.added, 1.0, dims)
        if along.relative <= allowed * along.condition:
            text = f"the numbers are right, but in another order along dimension {dim}"
            return Cause(text, tuple(axis for axis in layout.axes if axis not in best.added) or differing)
    if not layout.cut:
        for size, axes in _sizes(layout.axes):
            for factor, word in ((1 / size, "large"), (size, "small")):
                scaled = layout.combined((), factor, ())
                if scaled.relative <= allowed * scaled.condition:
                    return _times(size, word, axes)
    return None


def explained(
    found: Difference, match: Match, matches: Matches, verdicts: Mapping[int, Verdict]
) -> Difference:
    """Return a difference with its reason, its ranks and the mesh dimensions along which it arises."""
    verdict, layout = verdicts[match.number], match.layout
    best, allowed = verdict.best, verdict.allowed
    if match.is_gradient:
        makers = {(rank, matches.runs[rank].parts[number].maker) for rank, number in match.pieces.values()}
        exchanges = _exchanged_since_right(makers, matches, verdicts)
        coarsest = max((record.eps for record, _ in exchanges), default=0.0)
        cause = cause_in_gradient(layout, best, allowed, coarsest if coarsest > match.mine.eps else 0.0)
        groups = {group for record, group in exchanges if not cause.is_coarse or record.eps == coarsest}
        cause = cause.within([matches.mesh.axes_of(groups)])
    else:
        cause = (
            _cause_in_inputs(match, matches, verdicts)
            or cause_in_result(layout, best, allowed)
            or _unknown_cause(match, matches, verdicts)
        )
    return replace(
        found,
        reason=found.reason or cause.text,
        ranks=wrong_ranks(layout, best, allowed, matches.mesh),
        mesh=tuple(axis.name for axis in cause.axes),
    )


def wrong_ranks(layout: Layout, best: Combined, allowed: float, mesh: ProcessMesh) -> tuple[int, ...]:
    """Return the ranks whose replicas of a tensor are wrong.

    If the tensor is the sum of pieces on several ranks, no single rank can be blamed. Then return all ranks
    that hold a piece of the sum.
    """
    number, ranks = len(mesh.axes), mesh.ranks
    wrong = {place for place, apart in best.unlike.items() if apart > allowed * best.condition}
    places = wrong if not best.added and wrong else set(layout.pieces)
    return tuple(sorted({ranks[place[:number]] for place in places}))


def _exchanged_since_right(
    results: Iterable[tuple[int, int]], matches: Matches, verdicts: Mapping[int, Verdict]
) -> list[tuple[OpRecord, tuple[int, ...]]]:
    """Return the collectives that ran between the last correct results and the given wrong results.

    Each entry is a tuple of the collective's record and the collective's ranks.

    Args:
        results: The wrong results, each as a tuple (rank, index of the result in that rank's run).
        matches: The results that exist in both runs.
        verdicts: Maps the index of each matched result to its verdict.
    """
    exchanges = []
    seen, left = set[tuple[int, int]](), list(results)
    while left:
        rank, number = left.pop()
        matched = matches.theirs.get((rank, number))
        is_right = matched is not None and verdicts[matched].is_equal
        if number < 0 or (rank, number) in seen or is_right:
            continue
        seen.add((rank, number))
        run = matches.runs[rank]
        left += [(rank, read.made_by) for read in run.records[number].reads]
        if run.parts[number].group:
            exchanges.append((run.records[number], run.parts[number].group))
    return exchanges


def _cause_in_inputs(match: Match, matches: Matches, verdicts: Mapping[int, Verdict]) -> Cause | None:
    """Explain a wrong input that should be the same on all ranks.

    Return None if no input is wrong, or if no wrong input can be explained.
    """
    limit = verdicts[match.number].usual
    for index, read in enumerate(match.mine.reads):
        inputs = _inputs_of(match, matches, index)
        if inputs is None:
            return None
        layout = Layout(whole=Piece(read, _UNKNOWN), pieces=inputs, axes=match.layout.axes)
        plain = layout.combined((), 1.0, ())
        if not layout.is_comparable or plain.relative <= limit:
            continue
        cause = cause_in_gradient(layout, plain, limit)
        if cause.text:
            makers = {(rank, inputs[place].held.made_by) for place, (rank, _) in match.pieces.items()}
            groups = {group for _, group in _exchanged_since_right(makers, matches, verdicts)}
            cause = cause.within([matches.mesh.axes_of(groups)]) if "times" in cause.text else cause
            return cause._replace(text=f"an input is wrong: {cause.text}")
    return None


def _inputs_of(match: Match, matches: Matches, index: int) -> dict[tuple[int, ...], Piece] | None:
    """Return, for each rank, input number ``index`` of the op that computed a result.

    If the op has too few inputs on any rank, return None.
    """
    if any(len(record.reads) <= index for record in match.theirs):
        return None
    return {
        place: Piece(matches.runs[rank].records[number].reads[index], _UNKNOWN)
        for place, (rank, number) in match.pieces.items()
    }


def _unknown_cause(match: Match, matches: Matches, verdicts: Mapping[int, Verdict]) -> Cause:
    """Return a cause with the mesh dimensions that may be responsible for an unexplained difference."""
    axes = match.layout.differing_axes(verdicts[match.number].allowed) or match.layout.axes
    clues = [
        _partial_inputs(match, matches, verdicts),
        _newly_differing(match, matches),
        _exchanged_before(match, matches),
    ]
    return Cause(_made_alone(match, matches), axes).within(clues)


def _partial_inputs(match: Match, matches: Matches, verdicts: Mapping[int, Verdict]) -> tuple[Axis, ...]:
    """Return the mesh dimensions over which an input is a partial sum.

    The first input of a division is not checked, because a correct program may pass a partial sum there.
    """
    found: set[Axis] = set()
    for rank, number in match.pieces.values():
        record = matches.runs[rank].records[number]
        # A division is linear in its first input, which may be a partial sum.
        for read in record.reads[-1:] if record.base == "div" else record.reads:
            made_by = matches.theirs.get((rank, read.made_by))
            if made_by is not None and not matches.by_number[made_by].layout.cut:
                found.update(verdicts[made_by].best.added)
    return tuple(found)


def _newly_differing(match: Match, matches: Matches) -> tuple[Axis, ...]:
    """Return the mesh dimensions along which an input differs, but did not differ in the previous step."""
    (step, direction, module, op), nth = match.place
    before = matches.at.get(((step - 1, direction, module, op), nth))
    if before is None:
        return ()
    now, then = _differing_inputs(match, matches), _differing_inputs(before, matches)
    return tuple({axis for own, earlier in zip(now, then, strict=False) for axis in own - earlier})


def _differing_inputs(match: Match, matches: Matches) -> list[set[Axis]]:
    """Return, for each input of a result, the mesh dimensions along which the input differs."""
    found: list[set[Axis]] = []
    while (inputs := _inputs_of(match, matches, len(found))) is not None:
        layout = Layout(whole=next(iter(inputs.values())), pieces=inputs, axes=match.layout.axes)
        found.append(set(layout.differing_axes(8 * match.mine.eps)))
    return found


def _exchanged_before(match: Match, matches: Matches) -> tuple[Axis, ...]:
    """Return the mesh dimensions along which ranks exchanged data before the result was computed."""
    groups = {
        matches.runs[rank].parts[earlier].group
        for rank, number in match.pieces.values()
        for earlier in range(number)
    }
    return matches.mesh.axes_of(groups)


def _made_alone(match: Match, matches: Matches) -> str:
    """Describe an input that comes from an op that ran on a rank, but not in the single-process run.

    Return an empty string if every op that computed an input of the result also ran in the single process.
    """
    for rank, number in match.pieces.values():
        records = matches.runs[rank].records
        for read in records[number].reads:
            if read.made_by >= 0 and (rank, read.made_by) not in matches.theirs:
                return (
                    f"an input comes from {records[read.made_by]}, which the run of one process does not have"
                )
    return ""
