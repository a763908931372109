"""Match the results of a single-process run with the results of several ranks or micro-batches.

for each step, direction, module and op:

    list the results of the single-process run and the results of each rank, in the order of execution

    if each rank has as many results as the single-process run, match the results one to one

    else if each micro-batch on a rank has as many results as the single-process run, match them one to one

    else drop results whose shapes cannot match any result of the other run, and count the results again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from amp_plugin.numerics.layouts import MICRO_BATCHES, Coordinates, Layout, Piece
from amp_plugin.numerics.module_names import name_in_first
from amp_plugin.numerics.parts import Axis
from amp_plugin.numerics.process_mesh import ProcessMesh
from amp_plugin.numerics.recorded import OpRecord, Run

Place = tuple[int, str, str, str]  # step, direction, module, op


class Match(NamedTuple):
    """A result of the single-process run, with the corresponding results of the ranks.

    Attributes:
        number: The index of the result in the single-process run.
        place: The step, direction, module and op of the result, and its position among all results that share
            these four.
        pieces: Maps mesh coordinates to (rank, index of the result in that rank's run).
        mine: The record of the result in the single-process run.
        theirs: The record of the matching result on each rank.
        layout: The result of the single-process run, and its pieces on the ranks.
        is_gradient: Whether the result is a gradient that reaches the optimizer.
    """

    number: int
    place: tuple[Place, int]
    pieces: Mapping[Coordinates, tuple[int, int]]
    mine: OpRecord
    theirs: Sequence[OpRecord]
    layout: Layout
    is_gradient: bool


class Matches:
    """All results that exist in the single-process run and on all ranks.

    Args:
        whole: The single-process run.
        runs: Maps each rank to its run.
        names: Maps module names of the single-process run to those of the ranks.

    Attributes:
        whole, runs: The arguments.
        mesh: The ranks as a mesh.
        micro_batches: The number of micro-batches that each rank runs per batch of the single-process run.
        all: The matched results, in the order in which the single process computed them.
    """

    def __init__(self, whole: Run, runs: Mapping[int, Run], names: Mapping[str, str]) -> None:
        self.whole, self.runs, self.mesh = whole, runs, ProcessMesh(runs)
        mine = _by_place(whole, {})
        theirs = {rank: _by_place(run, names) for rank, run in runs.items()}
        self.micro_batches = _micro_batches(mine, theirs)
        found = [
            match
            for place, numbers in mine.items()
            for match in self._at_place(
                place, numbers, {rank: placed[place] for rank, placed in theirs.items() if place in placed}
            )
        ]
        self.all = sorted(found, key=lambda match: match.number)

    def axes(self, repeats: int) -> tuple[Axis, ...]:
        """Return all mesh dimensions. If ``repeats`` is above 1, append a dimension for the micro-batches."""
        return (*self.mesh.axes, *([Axis(MICRO_BATCHES, repeats)] if repeats > 1 else []))

    @cached_property
    def at(self) -> dict[tuple[Place, int], Match]:
        """Maps the ``place`` attribute of each match to the match."""
        return {match.place: match for match in self.all}

    @cached_property
    def by_number(self) -> dict[int, Match]:
        """Maps the index of a result in the single-process run to its match."""
        return {match.number: match for match in self.all}

    @cached_property
    def theirs(self) -> dict[tuple[int, int], int]:
        """Maps (rank, index of a result) to the index of the same result in the single-process run."""
        return {entry: match.number for match in self.all for entry in match.pieces.values()}

    def _at_place(
        self, place: Place, mine: Sequence[int], theirs: Mapping[int, Sequence[int]]
    ) -> Iterator[Match]:
        for repeats in dict.fromkeys((1, self.micro_batches)):
            chosen = self._alike(mine, theirs, repeats)
            if chosen is None:
                continue
            numbers, others = chosen
            for nth, number in enumerate(numbers):
                pieces = {
                    (*self.mesh.places[rank], *([micro] if repeats > 1 else [])): (
                        rank,
                        records[micro * len(numbers) + nth],
                    )
                    for rank, records in others.items()
                    for micro in range(repeats)
                }
                match = self._match(number, (place, nth), pieces, self.axes(repeats))
                part = self.whole.parts[number]
                is_constant = part.is_made and not part.is_random  # such as the positions of a shard
                if not is_constant and match.layout.is_comparable:
                    yield match
            return

    def _match(
        self,
        number: int,
        place: tuple[Place, int],
        pieces: Mapping[Coordinates, tuple[int, int]],
        axes: tuple[Axis, ...],
    ) -> Match:
        mine = self.whole.records[number]
        theirs = {at: self.runs[rank].records[other] for at, (rank, other) in pieces.items()}
        layout = Layout(
            whole=Piece(mine.held, self.whole.parts[number]),
            pieces={
                at: Piece(theirs[at].held, self.runs[rank].parts[other])
                for at, (rank, other) in pieces.items()
            },
            axes=axes,
        )
        is_gradient = number in self.whole.gradients
        return Match(number, place, pieces, mine, [*theirs.values()], layout, is_gradient)

    def _alike(
        self, mine: Sequence[int], theirs: Mapping[int, Sequence[int]], repeats: int
    ) -> tuple[Sequence[int], Mapping[int, Sequence[int]]] | None:
        """Return the results that can be matched one to one.

        If one run has more results than the other, first drop each result whose shape cannot match any result
        of the other run. If the two runs still have different numbers of results, return None.
        """

        def counts_agree(mine: Sequence[int], theirs: Mapping[int, Sequence[int]]) -> bool:
            return bool(mine and theirs) and all(
                len(numbers) == repeats * len(mine) for numbers in theirs.values()
            )

        if counts_agree(mine, theirs):
            return mine, theirs
        shapes = {number: self.whole.parts[number].shape for number in mine}
        others = {
            (rank, number): self.runs[rank].parts[number].shape
            for rank, numbers in theirs.items()
            for number in numbers
        }
        fitting = {
            rank: [n for n in numbers if any(_may_be_part(others[rank, n], s) for s in shapes.values())]
            for rank, numbers in theirs.items()
        }
        left = [others[rank, number] for rank, numbers in fitting.items() for number in numbers]
        own = [number for number, shape in shapes.items() if any(_may_be_part(part, shape) for part in left)]
        return (own, fitting) if counts_agree(own, fitting) else None


def _by_place(run: Run, names: Mapping[str, str]) -> dict[Place, list[int]]:
    placed: dict[Place, list[int]] = {}
    for number, record in enumerate(run.records):
        place = (record.step, record.direction, name_in_first(names, record.module), record.op)
        placed.setdefault(place, []).append(number)
    return placed


def _micro_batches(
    mine: Mapping[Place, Sequence[int]], theirs: Mapping[int, Mapping[Place, Sequence[int]]]
) -> int:
    """Return the number of micro-batches.

    The number of micro-batches equals the number of times that a rank runs an op that the single process runs
    once. If the forward ops inside modules imply different numbers, return the most common number.
    """
    ratios: Counter[int] = Counter()
    for place, numbers in mine.items():
        if place[1] == "forward" and place[2]:
            for placed in theirs.values():
                count, rest = divmod(len(placed.get(place, ())), len(numbers))
                ratios[count if not rest else 0] += count > 0
    del ratios[0]
    return max(ratios, key=lambda ratio: ratios[ratio]) if ratios else 1


def _may_be_part(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) == len(whole) and all(mine <= size for mine, size in zip(shape, whole, strict=True))
