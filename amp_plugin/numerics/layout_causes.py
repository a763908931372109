"""What explains a result that is wrong on several ranks: a sum that is missing, one too many, an order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from amp_plugin.numerics.layouts import Axis, Combined, Layout

_GROWTH = 3.0  # an op may enlarge the difference of its inputs by this factor


class Cause(NamedTuple):
    """What explains a difference, and along which dimensions of the mesh.

    Attributes:
        text: the explanation; empty if there is none.
        axes: dimensions of the mesh along which the difference may arise.
        is_known: whether it is explained; else ``axes`` are all that come into question.
        is_coarse: whether an exchange in a coarse dtype explains it.
    """

    text: str
    axes: tuple[Axis, ...]
    is_known: bool = True
    is_coarse: bool = False

    def within(self, clues: Iterable[Collection[Axis]]) -> Cause:
        """Return the cause with those dimensions alone that the first clue which has some of them names."""
        for clue in clues:
            axes = tuple(axis for axis in self.axes if axis in clue)
            if axes:
                return self._replace(axes=axes)
        return self


def cause_in_gradient(layout: Layout, best: Combined, allowed: float, coarsest: float = 0.0) -> Cause:
    """Return what explains a gradient or a weight that is wrong.

    Args:
        layout: the gradient on all ranks.
        best: the way to put it together.
        allowed: the difference that rounding explains, relative.
        coarsest: the eps of the dtype in which it was exchanged, if that is coarser than its own; else 0.
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
            return Cause("its parts are in another order", best.added)
    if coarsest and best.relative <= (_GROWTH * coarsest + allowed) * best.condition:
        text = "the exchange between the ranks rounds more than the passes do: it is in a coarser dtype"
        return Cause(text, layout.axes, is_coarse=True)
    return Cause("", layout.differing_axes(allowed) or best.added or layout.axes, is_known=False)


def _times(size: int, word: str, axes: tuple[Axis, ...]) -> Cause:
    causes = {
        "large": "reduced twice, or summed where a mean is due",
        "small": "divided once more than is due",
    }
    return Cause(f"it is {size} times too {word}: {causes[word]}", axes)


def _missing_sum(layout: Layout, best: Combined, allowed: float) -> Cause | None:
    """Return which sum or mean over ranks is missing, if one is."""
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
    """Yield products of sizes of dimensions, each with those that it may belong to."""
    found: dict[int, list[Axis]] = {}
    for subset in _other_subsets(tuple(axis for axis in axes if axis.size > 1), ()):
        size = math.prod(axis.size for axis in subset)
        if len(subset) == 1 or size not in found:
            found.setdefault(size, []).extend(subset)
    yield from ((size, tuple(members)) for size, members in found.items())


def cause_in_result(layout: Layout, best: Combined, allowed: float) -> Cause | None:
    """Return what explains a result that is wrong; None if nothing does."""
    differing = layout.differing_axes(allowed) or layout.axes
    for dim in range(len(layout.whole.part.shape)):
        dims = tuple(sorted({*layout.cut, dim}))
        if dim in layout.cut or dims not in layout.whole.part.sums:
            continue
        along = layout.combined(best.added, 1.0, dims)
        if along.relative <= allowed * along.condition:
            text = f"the same numbers in another order along dimension {dim}"
            return Cause(text, tuple(axis for axis in layout.axes if axis not in best.added) or differing)
    if not layout.cut:
        for size, axes in _sizes(layout.axes):
            for factor, word in ((1 / size, "large"), (size, "small")):
                scaled = layout.combined((), factor, ())
                if scaled.relative <= allowed * scaled.condition:
                    return _times(size, word, axes)
    return None
