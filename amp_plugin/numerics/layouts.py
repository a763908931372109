"""Combine the pieces of a tensor on several ranks, to compare it with the tensor of a single-process run.

The ranks form a mesh. Along each dimension of the mesh, the pieces of a tensor are shards, partial sums or
replicas. The sums and sketches of shards and of partial sums are added up (see parts.py). Replicas must be
equal. The shapes of the pieces show whether the tensor is sharded. If the tensor is not sharded, the values
of its pieces show whether they are replicas or partial sums. If each rank runs several micro-batches one
after another, the micro-batches count as one more dimension of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from amp_plugin.numerics.parts import Axis, Dims, Part
from amp_plugin.numerics.values import Fingerprint

Coordinates = tuple[int, ...]

MICRO_BATCHES = "micro-batches"


class Piece(NamedTuple):
    """The recorded description of a tensor on one rank or in the single-process run."""

    held: Fingerprint
    part: Part


class Combined(NamedTuple):
    """One way to combine the pieces of a tensor, and how much the result differs from the single-process run.

    Attributes:
        relative: The norm of the difference between the combined pieces and the tensor in the single-process
            run, divided by the norm of the tensor.
        added: The mesh dimensions along which the pieces are summed. Along all mesh dimensions that are not
            in ``added``, the pieces must be equal.
        condition: The joint norm of all pieces that are summed, divided by the norm of the tensor; at least
            1. The tolerance for rounding is multiplied by ``condition``.
        unlike: Maps the mesh coordinates of each replica to its relative difference from the tensor in the
            single-process run. If pieces are summed, there is one entry for each sum.
    """

    relative: float
    added: tuple[Axis, ...]
    condition: float
    unlike: Mapping[Coordinates, float]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A tensor of the single-process run, and its pieces on the ranks.

    Attributes:
        whole: The tensor as it was recorded in the single-process run.
        pieces: Maps coordinates on the mesh to the piece at these coordinates. Ranks that hold no element of
            the tensor have no piece.
        axes: The dimensions of the mesh.
    """

    whole: Piece
    pieces: Mapping[Coordinates, Piece]
    axes: tuple[Axis, ...]

    @property
    def cut(self) -> Dims:
        """The dimensions of the tensor along which at least one rank holds only a part."""
        shape = self.whole.part.shape
        shapes = [piece.part.shape for piece in self.pieces.values()]
        return tuple(dim for dim, size in enumerate(shape) if any(other[dim] != size for other in shapes))

    @property
    def is_comparable(self) -> bool:
        """Whether the pieces can be compared with the tensor in the single-process run.

        If the positions of the pieces are known, the pieces can always be compared. Otherwise, no piece may
        be larger than the tensor, and the recording must contain the tensor's sums over its split dimensions.
        If the tensor is not split, every rank must have recorded it.
        """
        if self.is_located:
            return True
        shape = self.whole.part.shape
        for piece in self.pieces.values():
            other = piece.part.shape
            if len(other) != len(shape) or any(mine > size for mine, size in zip(other, shape, strict=True)):
                return False
        cut, ranks = self.cut, math.prod(axis.size for axis in self.axes)
        if not cut:
            return len(self.pieces) == ranks
        return cut in self.whole.part.sums and self._parts_in(cut) <= ranks

    @property
    def is_located(self) -> bool:
        """Whether the positions of the pieces in the whole tensor are known (see shares.py)."""
        shape = self.whole.part.shape
        return all(piece.part.whole_shape == shape and piece.part.whole for piece in self.pieces.values())

    def ways(self, *, are_means: bool = False, are_backward: bool = False) -> Iterator[Combined]:
        """Yield every way to combine the pieces that is consistent with their shapes.

        Combinations that sum the pieces along fewer mesh dimensions come first.

        Args:
            are_means: Whether each piece could be a mean over one rank's part of the batch. If so, the mean
                of the pieces is also tried.
            are_backward: Whether each piece could be the gradient of a loss averaged over only one rank's
                part of the batch. The gradient of a local mean is larger than the gradient of the mean
                over the whole batch, so factors below 1 are also tried.
        """
        cut = self.cut
        for added in _subsets(self.axes):
            if cut and math.prod(axis.size for axis in added) < self._parts_in(cut):
                continue
            for scale in _scales(self.axes) if are_backward else _scales(added) if are_means else (1.0,):
                yield self.combined(added, scale, cut)

    def strict_ways(self) -> Iterator[Combined]:
        """Yield the ways to combine the pieces of a gradient or a weight.

        The shards of a gradient or weight must make up the whole tensor. Along mesh dimensions over which the
        tensor is not sharded, the pieces must be equal.
        """
        if self.is_located:
            names = next(iter(self.pieces.values())).part.added
            added = tuple(axis for axis in self.axes if axis.name in names)
            yield self.located(added)
            return
        cut = self.cut
        for added in _subsets(self.axes):
            if math.prod(axis.size for axis in added) == self._parts_in(cut):
                yield self.combined(added, 1.0, cut)

    def _parts_in(self, cut: Dims) -> int:
        """Return the number of shards into which the tensor is split."""
        whole = self.whole.part.shape
        largest = [max(piece.part.shape[dim] for piece in self.pieces.values()) for dim in cut]
        return math.prod(-(-whole[dim] // size) for dim, size in zip(cut, largest, strict=True))

    def located(self, added: tuple[Axis, ...], factor: float = 1.0) -> Combined:
        """Combine pieces whose positions in the tensor are known, and multiply the result by a factor."""
        scale = factor / next(iter(self.pieces.values())).part.divided
        return self._sum(added, scale, lambda piece: piece.part.whole, self.whole.held.sketch)

    def combined(self, added: tuple[Axis, ...], scale: float, cut: Dims) -> Combined:
        """Combine pieces whose order is unknown. The tensor is split along the dimensions in ``cut``."""
        if not cut:
            if not added and scale == 1:
                return self._same()
            return self._sum(added, scale, lambda piece: piece.held.sketch, self.whole.held.sketch)
        found = self._sum(added, scale, lambda piece: piece.part.sums[cut], self.whole.part.sums[cut])
        if math.prod(axis.size for axis in added) > self._parts_in(cut):
            return found
        return found._replace(relative=max(found.relative, self._apart_in_norm(added, scale)))

    def _same(self) -> Combined:
        unlike = {place: piece.held.difference(self.whole.held) for place, piece in self.pieces.items()}
        return Combined(max(unlike.values()), (), 1.0, unlike)

    def _sum(
        self,
        added: tuple[Axis, ...],
        scale: float,
        vector_of: Callable[[Piece], Sequence[float]],
        whole: Sequence[float],
    ) -> Combined:
        if any(piece.held.unfinite for piece in (self.whole, *self.pieces.values())):
            counts = self._groups(added, lambda piece: [float(piece.held.unfinite)])
            if any(count[0] != self.whole.held.unfinite for count in counts.values()):
                return Combined(math.inf, added, 1.0, dict.fromkeys(counts, math.inf))
        size = max(math.hypot(*whole), self.whole.held.norm)
        unlike = {
            place: _relative(math.dist([scale * number for number in total], whole), size)
            for place, total in self._groups(added, vector_of).items()
        }
        squares = self._groups(added, lambda piece: [piece.held.norm**2]).values()
        largest = scale * math.sqrt(max(total[0] for total in squares))
        condition = max(1.0, largest / size) if size else 1.0
        return Combined(max(unlike.values()), added, condition, unlike)

    def _apart_in_norm(self, added: tuple[Axis, ...], scale: float) -> float:
        squares = self._groups(added, lambda piece: [piece.held.norm**2]).values()
        norm = self.whole.held.norm
        return max(_relative(abs(scale * math.sqrt(total[0]) - norm), norm) for total in squares)

    def _groups(
        self, added: tuple[Axis, ...], vector_of: Callable[[Piece], Sequence[float]]
    ) -> dict[Coordinates, list[float]]:
        """Compute one vector for each piece, and sum these vectors along the mesh dimensions ``added``.

        The keys of the result are mesh coordinates, with 0 for each dimension in ``added``.
        """
        keeps = [axis not in added for axis in self.axes]
        totals: dict[Coordinates, list[float]] = {}
        for place, piece in self.pieces.items():
            key = tuple(number if keep else 0 for number, keep in zip(place, keeps, strict=True))
            vector = vector_of(piece)
            total = totals.get(key)
            totals[key] = list(vector) if total is None else [*map(sum, zip(total, vector, strict=True))]
        return totals

    def reduced(self, reduce: Callable[[Sequence[float]], float]) -> Combined | None:
        """Combine small tensors element by element, as an all-reduce of a norm or of a maximum does.

        Return None if the tensor is split or not small.
        """
        values = [piece.part.values for piece in self.pieces.values()]
        whole = self.whole.part.values
        if self.cut or not whole:
            return None
        found = [reduce(column) for column in zip(*values, strict=True)]
        apart = _relative(math.dist(found, whole), math.hypot(*whole))
        return Combined(apart, self.axes, 1.0, dict.fromkeys(self.pieces, apart))

    def differing_axes(self, allowed: float) -> tuple[Axis, ...]:
        """Return the dimensions of the mesh along which pieces differ by more than ``allowed``."""
        found = []
        for number, axis in enumerate(self.axes):
            lines: dict[Coordinates, list[Piece]] = {}
            for place, piece in self.pieces.items():
                lines.setdefault((*place[:number], *place[number + 1 :]), []).append(piece)
            if any(_differ(line, allowed) for line in lines.values()):
                found.append(axis)
        return tuple(found)


def _differ(pieces: Sequence[Piece], allowed: float) -> bool:
    first, *others = pieces
    return any(
        other.part.shape != first.part.shape or first.held.difference(other.held) > allowed
        for other in others
    )


def _relative(apart: float, size: float) -> float:
    return 0.0 if apart == 0 else apart / size if size else math.inf


def _subsets(axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


def _scales(axes: tuple[Axis, ...]) -> tuple[float, ...]:
    """Return the factors that can turn a sum over ranks into a mean over some of the ranks.

    The first factor is 1.
    """
    sizes = [math.prod(axis.size for axis in subset) for subset in _subsets(axes)]
    return tuple(1 / size for size in dict.fromkeys(sizes))
