"""Which part of a weight or gradient a rank holds, and where this part is in the whole tensor.

The position is known from one of three sources::

    a DTensor            gives its placements on its device mesh
    FSDP1                flattens the weights of a unit, and shares out the flat tensor
    record_run(..., mesh=mesh, placements={...})
                         gives the placements of weights that the program shards itself
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
"""The placements of weights by name. In a name, ``*`` stands for any text."""

Share = tuple[str, Tensor, Callable[[Tensor], Part]]
"""The name of a weight, a rank's part of it or of its gradient, and a function that describes this part.

The function takes the part as it would be without rounding.
"""

FlatShare = tuple[str, slice, Callable[[Tensor], Part]]
"""The same for a weight in a flat parameter. The slice selects the part in it."""

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
    """Yield the parts that a rank holds of a weight, or of its gradient.

    There is one, or one for each weight that FSDP1 has put into a flat parameter.

    Args:
        weight: The weight that the optimizer has.
        tensor: The weight or its gradient.
        name: The name of the weight.
        rank: A rank that torch simulates in this process. None for the rank of the process.
        mesh: The mesh of the program's own shards.
        asked: The placements of the program's own shards.
        flat: Maps the id of a weight to the weights that FSDP1 keeps in it.
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
    """Return the placements that a program gives for a weight; empty if it gives none."""
    return next((given for pattern, given in asked.items() if fnmatchcase(clean_name(name), pattern)), ())


def check_placements(asked: Placements, mesh: DeviceMesh | None) -> None:
    """Raise ValueError unless there is a mesh with as many dimensions as each weight has placements."""
    if asked and mesh is None:
        msg = "placements= needs mesh=, the device mesh on which the weights are placed"
        raise ValueError(msg)
    for name, given in asked.items():
        if mesh is not None and len(given) != mesh.ndim:
            raise ValueError(_DIMENSIONS.format(name=name, given=len(given), count=mesh.ndim))


def _whole_shape(exact: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of a whole tensor whose shards are equally large."""
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
    """Return the position of each element in the whole tensor, flattened."""
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
    """Return the dimensions of a device mesh, each with the place of a rank on it.

    There are none if there is no mesh, or if the rank is not on it.

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
    """Return the dimensions of a DTensor's device mesh, as ``axes_of`` does; none for other tensors."""
    return axes_of(getattr(tensor, "device_mesh", None), rank)
