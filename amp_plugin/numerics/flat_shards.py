"""Find the weights that FullyShardedDataParallel (FSDP1) has flattened, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_plugin.numerics.parts import Axis, Part, part_of, placed

_SHARDS, _REPLICAS = "shards", "replicas"


def is_flat_unit(module: nn.Module) -> bool:
    """Return whether FSDP1 wraps a module. Nothing is imported."""
    return type(module).__name__ == "FullyShardedDataParallel"


def flat_shards(unit: Any) -> Iterator[tuple[Tensor, nn.Module, str, slice, Callable[[Tensor], Part]]]:
    """Yield this rank's parts of the weights in an FSDP1 unit.

    Yields:
        Tuples (parameter, module, name, slice, describe). ``parameter`` is the parameter that the optimizer
        updates. This parameter is the weight itself if ``use_orig_params`` is set, and the unit's flat
        parameter otherwise. ``module`` is the module that owns the weight, and ``name`` is the weight's name
        in this module. ``slice`` selects this rank's part in the flat parameter. ``describe`` is a function
        that takes the values of the part and returns a ``Part``.
    """
    flat = unit._flat_param
    if flat is None:  # the unit has no weights of its own
        return
    added = [name for name in (_SHARDS,) if any(axis.name == name for axis in mesh_of_unit(unit))]
    for number, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
        part = flat._shard_param_infos[number]
        holder, begin = flat, part.offset_in_shard or 0
        if flat._params is not None:
            holder, begin = flat._params[number], 0
        elements = slice(begin, begin + (part.numel_in_shard or 0))
        describe = partial(_described, tuple(shape), part.intra_param_start_idx or 0, added)
        yield holder, info.module, info.param_name, elements, describe


def _described(shape: Sequence[int], start: int, added: Sequence[str], exact: Tensor) -> Part:
    """Describe a part of a flattened weight.

    Args:
        shape: The shape of the whole weight.
        start: The index of the part's first element in the flattened weight.
        added: The names of the mesh dimensions along which the weight is sharded.
        exact: The values that the flattened part would have without rounding.
    """
    places = torch.arange(start, start + exact.numel(), device=exact.device)
    part = replace(part_of(exact), shape=tuple(shape), sums={})
    return placed(part, exact, places, shape, added=added)


def mesh_of_unit(unit: Any) -> dict[Axis, int]:
    """Map the mesh dimensions of an FSDP1 unit to the coordinates of this rank.

    The dimension ``shards`` exists if weights are sharded. The dimension ``replicas`` exists if the strategy
    is hybrid or weights are not sharded.
    """
    own, between = unit.process_group, getattr(unit, "_inter_node_pg", None)
    if unit.sharding_strategy.name == "NO_SHARD":
        groups = {_REPLICAS: own}
    else:
        groups = {_SHARDS: own} if between is None else {_REPLICAS: between, _SHARDS: own}
    return {Axis(name, group.size()): group.rank() for name, group in groups.items()}
