"""The collectives that a step of a model should run, by what torch keeps of ``fully_shard`` and of FSDP1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.sharding import report
from amp_plugin.sharding.collectives import Collective

KINDS = {"fsdp2": FSDPModule, "fsdp1": FullyShardedDataParallel, "ddp": DistributedDataParallel}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedUnit(report.ShardUnit):
    """A unit, and what its collectives should carry.

    Attributes:
        elements: Its parameters with the padding that makes all shards equal.
        gathered_bytes: Of those elements as they are gathered.
        trained: Those elements, with padding, that have gradients.
        shard_ranks: Over which it is sharded.
        replicas: Over which the shards are replicated.
        is_gathered_again: Whether backward gathers it once more.
    """

    elements: int
    gathered_bytes: int
    trained: int
    shard_ranks: int = 1
    replicas: int = 1
    is_gathered_again: bool = False

    def collectives(self) -> list[Collective]:
        """Return the collectives of a forward and backward pass that reduces gradients, in order."""
        found = []
        if self.shard_ranks > 1:
            items = self.gathered_bytes // self.gathered.itemsize
            gather = _call("all_gather", self.gathered, items, self.shard_ranks)
            found += [gather] * (1 + self.is_gathered_again)
        if self.reduced is not None and self.shard_ranks > 1:
            found.append(_call("reduce_scatter", self.reduced, self.trained, self.shard_ranks))
        if self.reduced is not None and self.replicas > 1:
            found.append(_call("all_reduce", self.reduced, self.trained // self.shard_ranks, self.replicas))
        return found


def _call(op: str, dtype: torch.dtype, elements: int, ranks: int) -> Collective:
    return Collective(
        op=op, dtype=short_name(dtype), elements=elements, ranks=ranks, bytes=elements * dtype.itemsize
    )


def shard_units(model: nn.Module) -> list[ExpectedUnit]:
    """Return the units of a model, as ``amp_plugin.sharding.report.shard_units``, with what they should carry."""
    roots = _outermost(model, (FSDPModule, FullyShardedDataParallel))
    found = []
    for unit in report.shard_units(model):
        (module,) = (
            module
            for name, module in model.named_modules()
            if clean_name(name) == unit.name and isinstance(module, KINDS.get(unit.engine, nn.Module))
        )
        carried = {"fsdp2": _fsdp2, "fsdp1": _fsdp1}.get(unit.engine, _whole)
        found.append(ExpectedUnit(**asdict(unit), **carried(unit, module, is_root=module in roots)))
    return found


def _outermost(model: nn.Module, kinds: tuple[type, ...]) -> set[nn.Module]:
    if isinstance(model, kinds):
        return {model}
    return set().union(*(_outermost(child, kinds) for child in model.children()))


def _fsdp2(unit: report.ShardUnit, module: Any, *, is_root: bool) -> dict[str, Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    params = [param for group in groups if group is not None for param in group.fsdp_params]
    group, policy = next(group for group in groups if group is not None), state._mp_policy
    mesh = group.mesh_info
    ranks = mesh.mesh.size(mesh.shard_mesh_dim) if mesh.shard_mesh_dim is not None else 1
    sizes = [param.padded_sharded_param_size.numel() for param in params]
    dtypes = [
        getattr(param, "mp_policy", policy).param_dtype or param.sharded_param.dtype for param in params
    ]
    kept_by_root = is_root and getattr(state, "_auto_reshard_after_forward", False)
    return {
        "elements": ranks * sum(sizes),
        "gathered_bytes": ranks * sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True)),
        "trained": ranks
        * sum(n for n, p in zip(sizes, params, strict=True) if p.sharded_param.requires_grad),
        "shard_ranks": ranks,
        "replicas": mesh.mesh.size(mesh.replicate_mesh_dim) if mesh.replicate_mesh_dim is not None else 1,
        "is_gathered_again": group.post_forward_mesh_info is not None and not kept_by_root,
    }


def _fsdp1(unit: report.ShardUnit, module: Any, *, is_root: bool) -> dict[str, Any]:
    strategy, ranks = module.sharding_strategy, module.process_group.size()
    is_whole, hybrid = strategy is ShardingStrategy.NO_SHARD, getattr(module, "_inter_node_pg", None)
    shard_ranks = 1 if is_whole else ranks
    elements = shard_ranks * module._flat_param._sharded_size.numel()
    again = strategy in {ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD}
    return {
        "elements": elements,
        "gathered_bytes": elements * unit.gathered.itemsize,
        "trained": elements,
        "shard_ranks": shard_ranks,
        "replicas": ranks if is_whole else hybrid.size() if hybrid is not None else 1,
        "is_gathered_again": again and not is_root,
    }


def _whole(unit: report.ShardUnit, module: Any, *, is_root: bool) -> dict[str, Any]:
    return {
        "elements": unit.parameters,
        "gathered_bytes": unit.parameters * unit.gathered.itemsize,
        "trained": sum(param.numel() for param in module.parameters() if param.requires_grad),
        "replicas": module.process_group.size() if unit.engine == "ddp" else 1,
    }
