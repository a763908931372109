"""The collectives that a step of the sharded Net should run, derived from its shapes and a dtype plan."""

from collections import Counter
from collections.abc import Collection
from math import ceil

import torch
from torch import Size, Tensor

from amp_plugin import DtypePlan
from amp_plugin.precision import short_name
from amp_plugin.sharding.fully_shard import has_dtypes_by_parameter
from amp_plugin.sharding.report import Collective
from tests.sharding.models import Net


def planned(units: Collection[str], dtypes: DtypePlan, strategy: str, ranks: int) -> Counter[Collective]:
    """Return how often each collective of a forward and backward pass runs.

    Args:
        units: Names of the modules that were sharded; ``""`` is the model.
        dtypes: The plan.
        strategy: ``"fsdp1"``, ``"fsdp2"``, ``"hsdp"`` or ``"tp"``. The last two use a mesh whose second dimension is 2.
        ranks: The number of ranks.
    """
    shards, replicas = (ranks // 2 if strategy in {"hsdp", "tp"} else ranks), 2 if strategy == "hsdp" else 1
    found: Counter[Collective] = Counter()
    for unit, params in _weights(units, dtypes, strategy).items():
        computed = {dtype for _, dtype in params}
        mixed = len(computed) > 1 and (strategy != "fsdp1" and has_dtypes_by_parameter())
        gathered = torch.uint8 if mixed else computed.pop()
        sizes = [_padded(shape, shards) for shape, _ in params]
        elements = (
            sum(sizes) if strategy != "fsdp1" else _flat([shape for shape, _ in params], gathered, shards)
        )
        carried = (
            sum(n * dtype.itemsize for n, (_, dtype) in zip(sizes, params, strict=True))
            if mixed
            else elements
        )
        # backward gathers the weights again
        found[_call("all_gather", gathered, carried, shards)] += 2 if unit else 1
        found[_call("reduce_scatter", dtypes.reduce_dtype, elements, shards)] += 1
        if replicas > 1:
            found[_call("all_reduce", dtypes.reduce_dtype, elements // shards, replicas)] += 1
    return found


def _weights(
    units: Collection[str], dtypes: DtypePlan, strategy: str
) -> dict[str, list[tuple[Size, torch.dtype]]]:
    """Return shape and dtype of each unit's own weights, without those of units inside it."""
    net, found = Net(), {}
    in_fp32 = dtypes.in_fp32(net)
    for name, param in net.named_parameters():
        owner = name.rpartition(".")[0]
        unit = max((unit for unit in units if not unit or f"{owner}.".startswith(f"{unit}.")), key=len)
        wide = net.get_submodule(owner) in in_fp32 or (strategy == "fsdp1" and dtypes.fp32_modules)
        shape = _part(name, param) if strategy == "tp" else param.shape
        found.setdefault(unit, []).append((shape, torch.float32 if wide else dtypes.compute_dtype))
    return found


def _part(name: str, param: Tensor) -> Size:
    """Return the shape of one rank's half: ``up`` is split by columns, ``down`` by rows."""
    if ".up." in name:
        return param.chunk(2)[0].shape
    return param.chunk(2, dim=1)[0].shape if name.endswith("down.weight") else param.shape


def _padded(shape: Size, shards: int) -> int:
    return ceil(shape[0] / shards) * shards * shape[1:].numel()


def _flat(shapes: list[Size], dtype: torch.dtype, shards: int) -> int:
    """Return the size of FSDP1's flat weight, in which each weight begins at a multiple of 16 bytes."""
    aligned, total = 16 // dtype.itemsize, 0
    for shape in shapes:
        total = ceil(total / aligned) * aligned + shape.numel()
    return ceil(total / shards) * shards


def _call(op: str, dtype: torch.dtype, elements: int, ranks: int) -> Collective:
    return Collective(
        op=op, dtype=short_name(dtype), elements=elements, ranks=ranks, bytes=elements * dtype.itemsize
    )
