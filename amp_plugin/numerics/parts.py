"""Describe a rank's part of a tensor by numbers that can be combined with those of other ranks.

A tensor that is whole in a single-process run may be split over the ranks of a distributed run. Each rank
stores numbers that are linear functions of its part. Therefore, the numbers can be added up after all ranks
have written their files.

- If the tensor is split along a dimension, each rank sums its part over this dimension. The total of these
  sums is the sum of the whole tensor over this dimension. The order of the parts does not matter.
- If each rank has a partial sum, the ranks' sketches add up to the sketch of the total. (A sketch is a short
  vector of random projections of a tensor.)
- If each rank has a replica, the ranks' sketches are equal.

The position of a part in the whole tensor is known from a DTensor, from FSDP1, or from a program that shards
its weights itself (see shares.py). If the position of a part is known, the random projections in its sketch
depend on the position. The sketches of all parts then add up to the sketch of the whole tensor, so a part in
a wrong position is detected.
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

_BUCKETS = 64  # a summed tensor with more elements than this is replaced by a sketch of this length
_MOST_VALUES = 16  # all elements of a tensor are stored if it has at most this many elements
_MOST_DIMS = 4  # a tensor with at most this many dimensions is also summed over pairs of dimensions


class Axis(NamedTuple):
    """A dimension of the device mesh."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Numbers that describe a rank's part of a tensor, and that can be added up over the ranks.

    Attributes:
        shape: The shape of the part. A complex tensor is described as a real tensor with one more dimension
            of size 2. If the part belongs to a flattened tensor, ``shape`` is the shape of the whole tensor
            before flattening.
        sums: Maps dimensions of the tensor to the sum over these dimensions, or to a sketch of this sum. The
            sum is a tensor without these dimensions.
        values: All elements of the part if there are at most 16; else empty.
        whole_shape: The shape of the whole tensor, if it is known; else empty.
        whole: A sketch of the part. The sketch depends on the position of each element in the whole tensor.
            Empty if the positions are not known.
        added: The names of the mesh dimensions along which the parts are shards or partial sums.
        divided: The number by which the sum of the parts is divided to get the whole tensor. This divisor is
            above 1 only for a partial mean.
        rounding: The relative difference between the part and the values that it would have without rounding.
        is_random: Whether the op draws random numbers.
        is_made: Whether the op reads no tensor.
        group: The ranks that take part in the collective; empty for all other ops.
        maker: The index of the recorded op that computed this gradient; -1 if the op is not known.
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
    """Return the description of a rank's part of a tensor.

    Args:
        exact: The values that the part would have without rounding.
    """
    values = real_values(exact)
    if values is None:  # integers and booleans can be compared only if each rank has the whole tensor
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
    """Return a copy of a part's description that also has the part's position in the whole tensor.

    Args:
        part: The description of ``exact``.
        exact: The values that the part would have without rounding.
        places: The index of each element in the flattened whole tensor, int64 of shape ``[numel]``.
        whole_shape: The shape of the whole tensor.
        added: The names of the mesh dimensions along which the parts are shards or partial sums.
        divided: The number by which the sum of the parts is divided to get the whole tensor.
    """
    whole = tuple(sketch_of(exact.reshape(-1), places).tolist())
    return replace(part, whole_shape=tuple(whole_shape), whole=whole, added=tuple(added), divided=divided)
