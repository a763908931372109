"""Find out which part of a weight or gradient a rank holds, and its position in the whole tensor.

The position of a part is known from one of three sources.

- A DTensor has placements on a device mesh.
- FSDP1 flattens the weights of a unit, and knows which slice of the flat tensor each rank holds.
- For weights that the program shards itself, ``record_run`` takes ``mesh`` and ``placements``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_plugin.numerics.parts import Axis, Part, part_of, placed
from amp_plugin.numerics.simulated_ranks import of_rank
from amp_plugin.patterns import clean_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

Placements = Mapping[str, Sequence["Placement"]]
"""Maps the names of weights to their placements. In a name, ``*`` stands for any text."""

Share = tuple[str, Tensor, Callable[[Tensor], Part]]
"""A rank's part of a weight or gradient, as (name of the weight, part, function that describes the part).

The function is called with the values that the part would have without rounding.
"""

FlatShare = tuple[str, slice, Callable[[Tensor], Part]]
"""A rank's part of a weight in a flat parameter of FSDP1, as (name, slice, function that describes it)."""

_DIMENSIONS = "placements={name!r}: got {given} placements; give one for each of the {count} mesh dimensions"


def shares_of(
    weight: Tensor,
    tensor: Tensor | None,
    name: str,
    *,
    rank: int | None,
    mesh: DeviceMesh | None,
    asked: Placements,
    flat: Mapping[int, Sequence[FlatShare]],
) -> Iterator[Share]:
    """Yield the parts of a weight or gradient that a rank holds.

    There is one part. If the weight is a flat parameter of FSDP1, there is one part for each weight in it.

    Args:
        weight: The weight, as the optimizer has it.
        tensor: The weight or its gradient.
        name: The name of the weight.
        rank: A rank that torch simulates in this process. None for the rank of the process.
        mesh: The device mesh for weights that the program shards itself.
        asked: The placements of weights that the program shards itself.
        flat: Maps the id of a flat parameter of FSDP1 to the weights in it.
    """
    if tensor is None:
        return
    local = of_rank(getattr(tensor, "_local_tensor", tensor), rank)
    if id(weight) not in flat:
        if local.numel():
            yield name, local, partial(_share, tensor, name, rank, mesh, asked)
        return
    for own_name, elements, describe in flat[id(weight)]:
        own = local.reshape(-1)[elements]
        if own.numel():
            yield own_name, own, describe


def _share(
    tensor: Tensor, name: str, rank: int | None, mesh: DeviceMesh | None, asked: Placements, exact: Tensor
) -> Part:
    part = part_of(exact)
    if exact.is_complex():
        return part
    if is_distributed(tensor):
        shape, placements = tuple(tensor.shape), tensor.placements  # type: ignore[attr-defined]
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
    else:
        placements = _placements_of(name, asked)
        if mesh is None or not placements:
            return part
        shape = _whole_shape(exact, mesh, placements)
    return _on_mesh(part, exact, shape, mesh, placements, rank)


def _placements_of(name: str, asked: Placements) -> Sequence[Any]:
    """Return the placements that the program gives for a weight, or an empty tuple if it gives none."""
    return next((given for pattern, given in asked.items() if fnmatchcase(clean_name(name), pattern)), ())


def check_placements(asked: Placements, mesh: DeviceMesh | None) -> None:
    """Check that there is a mesh, and that each weight has one placement per dimension of the mesh.

    A ValueError is raised otherwise.
    """
    if asked and mesh is None:
        msg = "placements= needs mesh=, the device mesh on which the weights are placed"
        raise ValueError(msg)
    for name, given in asked.items():
        if mesh is not None and len(given) != mesh.ndim:
            raise ValueError(_DIMENSIONS.format(name=name, given=len(given), count=mesh.ndim))


def _whole_shape(exact: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of the whole tensor, given that all its shards have the same size."""
    shape = [*exact.shape]
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] *= size
    return tuple(shape)


def _on_mesh(
    part: Part,
    exact: Tensor,
    whole_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Any],
    rank: int | None,
) -> Part:
    added, divided = [], 1.0
    for axis, placement in zip(axes_of(mesh, rank), placements, strict=False):
        if placement.is_partial() and placement.reduce_op not in {"sum", "avg"}:
            return part
        if placement.is_partial() and placement.reduce_op == "avg":
            divided *= axis.size
        if not placement.is_replicate():
            added.append(axis.name)
    offset = _offset_of(whole_shape, mesh, placements, rank)
    if len(offset) != exact.ndim:  # this rank is not on the mesh
        return part
    ends = [start + size for start, size in zip(offset, exact.shape, strict=True)]
    if any(end > size for end, size in zip(ends, whole_shape, strict=True)):
        return part
    places = _places(exact, offset, whole_shape)
    return placed(part, exact, places, whole_shape, added=added, divided=divided)


def _places(part: Tensor, offset: Sequence[int], whole_shape: Sequence[int]) -> Tensor:
    """Return the index of each element in the flattened whole tensor."""
    places, step = torch.zeros(part.shape, dtype=torch.int64, device=part.device), 1
    for dim in reversed(range(part.ndim)):
        along = torch.arange(part.shape[dim], device=part.device) + offset[dim]
        places += (along * step).reshape([-1] + [1] * (part.ndim - dim - 1))
        step *= whole_shape[dim]
    return places.reshape(-1)


def is_distributed(tensor: object) -> bool:
    """Return True if a tensor is a DTensor. Nothing is imported."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _offset_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Any], rank: int | None
) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    _, offset = of_rank(compute_local_shape_and_global_offset(tuple(shape), mesh, placements), rank)
    return tuple(map(int, offset))


def axes_of(mesh: DeviceMesh | None, rank: int | None = None) -> dict[Axis, int]:
    """Return the coordinate of a rank along each dimension of a device mesh.

    The dict is empty if there is no mesh, or if the rank is not part of the mesh.

    Args:
        mesh: The device mesh.
        rank: A rank that torch simulates in this process. None for the rank of the process.
    """
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return {}
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    return dict(zip(map(Axis, names, mesh.shape), map(int, of_rank([*place], rank)), strict=True))


def mesh_of(tensor: Any, rank: int | None = None) -> dict[Axis, int]:
    """Return the dimensions of a DTensor's device mesh, as ``axes_of`` does; empty for other tensors."""
    return axes_of(getattr(tensor, "device_mesh", None), rank)
