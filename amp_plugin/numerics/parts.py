"""The part of a tensor that one rank holds, in numbers that describe the whole tensor.

Several ranks may hold the parts of one tensor of a single process. All numbers that are kept here are linear.
So they can be combined later, when all ranks have written their files:

    the tensor is split along a dimension: the sums over that dimension add up, in whatever order it is split
    each rank has a partial sum: the sketches add up
    each rank has a replica: the sketches are equal

A DTensor says which part it is; so do FSDP1, and the program for weights that it shards itself
(shares.py). Then the sketch uses the positions in the whole tensor. The sketches of all parts add up to the
sketch of the whole tensor, so a part in a wrong position is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from amp_plugin.numerics.values import real_values, sketch_of

Dims = tuple[int, ...]

_BUCKETS = 64  # buckets for a sum over dimensions; a sum with fewer elements is kept unchanged
_MOST_VALUES = 16  # a tensor with at most so many elements is kept unchanged, too
_MOST_DIMS = 4  # the most dimensions of a tensor that is also summed over pairs of dimensions


class Axis(NamedTuple):
    """A dimension of the device mesh."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part of a tensor, in numbers that add up over the ranks.

    Attributes:
        shape: the shape of the part, with the two parts of a complex number as a dimension more. For a part
            of a flattened tensor, the shape of the whole tensor.
        sums: for dimensions that are summed over, the sum that is left, or its sketch.
        values: all elements, if they are few; else empty.
        whole_shape: the shape of the whole tensor, if it is known; else empty.
        whole: the sketch by places in the whole tensor; empty if they are not known.
        added: names of the mesh dimensions over which the parts add up, by shards or by partial sums.
        divided: by how much the sum of the parts is divided: the ranks, where a mean is due; else 1.
        rounding: how far the numbers of this run are from those without rounding, relative.
        is_random: whether the op draws random numbers.
        is_made: whether the op reads no tensor.
        group: for the result of a collective, the ranks that take part; else empty.
        maker: for a gradient, the number of the record that made it; -1 if the record is not known.
    """

    shape: tuple[int, ...]
    sums: Mapping[Dims, Sequence[float]]
    values: tuple[float, ...] = ()
    whole_shape: tuple[int, ...] = ()
    whole: tuple[float, ...] = ()
    added: tuple[str, ...] = ()
    divided: float = 1.0
    rounding: float = 0.0
    is_random: bool = False
    is_made: bool = False
    group: tuple[int, ...] = ()
    maker: int = -1


def part_of(exact: Tensor) -> Part:
    """Return what a rank's part says about the whole tensor.

    Args:
        exact: The part as it would be without rounding.
    """
    values = real_values(exact)
    if values is None:  # integers and booleans are compared only if all ranks have the whole tensor
        return Part(shape=tuple(exact.shape), sums={})
    finite = torch.where(values.isfinite(), values, 0.0)
    is_small = finite.numel() <= _MOST_VALUES
    return Part(
        shape=tuple(finite.shape),
        sums=dict(_sums(finite)),
        values=tuple(finite.flatten().tolist()) if is_small else (),
    )


def _sums(values: Tensor) -> Iterator[tuple[Dims, tuple[float, ...]]]:
    for count in (1, 2) if values.ndim <= _MOST_DIMS else (1,):
        for dims in combinations(range(values.ndim), count):
            left = values.sum(dims).reshape(-1)
            if left.numel() > _BUCKETS:
                left = sketch_of(left, torch.arange(left.numel(), device=left.device), _BUCKETS)
            yield dims, tuple(left.tolist())


def placed(
    part: Part,
    exact: Tensor,
    places: Tensor,
    whole_shape: Sequence[int],
    *,
    added: Sequence[str] = (),
    divided: float = 1.0,
) -> Part:
    """Return a part with its position in the whole tensor.

    Args:
        part: The part of ``exact``.
        exact: The part as it would be without rounding.
        places: The position of each element in the whole tensor, flattened: int64, ``[numel]``.
        whole_shape: The shape of the whole tensor.
        added: The names of the mesh dimensions over which the parts add up.
        divided: By how much the sum of the parts is divided.
    """
    whole = tuple(sketch_of(exact.reshape(-1), places).tolist())
    return replace(part, whole_shape=tuple(whole_shape), whole=whole, added=tuple(added), divided=divided)
