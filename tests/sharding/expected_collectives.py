"""The collectives that a step of a model should run, by what torch keeps of ``fully_shard`` and of FSDP1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from amp_plugin.precision import short_name
from amp_plugin.sharding.collective_log import Collective
from amp_plugin.sharding.unit_policies import has_dtypes_by_parameter
from amp_plugin.weights.store import local_of

Engine = Literal["fsdp2", "fsdp1", "ddp", "none"]
_WRAPPED: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUnit:
    """Weights that are gathered, and whose gradients are reduced, by one collective each.

    Attributes:
        name: Of the module that was sharded; ``""`` is the model.
        engine: What shards it: ``"fsdp2"``, ``"fsdp1"``, ``"ddp"`` (whole on each rank), or ``"none"``.
        stored: Dtype of its trainable weights between steps; of its first weight if all are frozen.
        gathered: Dtype in which its weights are gathered, and are in its forward; ``torch.uint8`` if several
            dtypes travel together, as bytes.
        reduced: Dtype in which its gradients are reduced; None if nothing in it is trained.
        parameters: Elements, of the whole unit (under tensor parallelism: of this rank's part of it).
        elements: The same with the padding that makes all shards equal.
        gathered_bytes: Of those elements as they are gathered.
        trained: Those elements, with padding, that have gradients.
        local_bytes: Of what this rank stores of its weights.
        shard_ranks: Over which it is sharded.
        replicas: Over which the shards are replicated.
        is_gathered_again: Whether backward gathers it once more.
    """

    name: str
    engine: Engine
    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    parameters: int
    elements: int
    gathered_bytes: int
    trained: int
    local_bytes: int
    shard_ranks: int = 1
    replicas: int = 1
    is_gathered_again: bool = False

    def collectives(self) -> list[Collective]:
        """Return the collectives of a forward and backward pass that reduces gradients, in order."""
        found = []
        is_sharded = self.engine in {"fsdp1", "fsdp2"}
        if is_sharded and self.shard_ranks > 1:
            items = self.gathered_bytes // self.gathered.itemsize
            gather = _call("all_gather", self.gathered, items, self.shard_ranks)
            found += [gather] * (1 + self.is_gathered_again)
        if self.reduced is not None:
            if is_sharded and self.shard_ranks > 1:
                found.append(_call("reduce_scatter", self.reduced, self.trained, self.shard_ranks))
            if self.replicas > 1:
                found.append(
                    _call("all_reduce", self.reduced, self.trained // self.shard_ranks, self.replicas)
                )
        return found


def _call(op: str, dtype: torch.dtype, elements: int, ranks: int) -> Collective:
    return Collective(
        op=op, dtype=short_name(dtype), elements=elements, ranks=ranks, bytes=elements * dtype.itemsize
    )


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return the units of a model, those that hold others last but one: the model itself is the last.

    Args:
        model: With its wrapper. Weights outside of units count as one unit that nothing reduces.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    named = {module: clean_name(name) for name, module in model.named_modules()}
    roots: set[Any] = _outermost(model, (FSDPModule, FullyShardedDataParallel))
    units = [_fsdp2(named[m], m, is_root=m in roots) for m in named if isinstance(m, FSDPModule)]
    units += [
        _fsdp1(named[m], m, is_root=m in roots) for m in named if isinstance(m, FullyShardedDataParallel)
    ]
    if not units:
        wrappers = [module for module in named if isinstance(module, DistributedDataParallel)]
        units = [_ddp(named[wrapper], wrapper) for wrapper in wrappers] or [_whole(model)]
    return [unit for unit in reversed(units) if unit is not None]


def is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP, of either version, shards a model or a part of it."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


def _outermost(model: nn.Module, kinds: tuple[type, ...]) -> set[nn.Module]:
    if isinstance(model, kinds):
        return {model}
    return set().union(*(_outermost(child, kinds) for child in model.children()))


def clean_name(name: str) -> str:
    """Return a module's name without those of wrappers: as it is in the model that was wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


# -- FSDP2 ---------------------------------------------------------------------------------------


def _fsdp2(name: str, module: Any, *, is_root: bool) -> ShardUnit | None:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    params = [param for group in groups if group is not None for param in group.fsdp_params]
    if not params:
        return None
    group, policy = next(group for group in groups if group is not None), state._mp_policy
    mesh = group.mesh_info
    ranks = mesh.mesh.size(mesh.shard_mesh_dim) if mesh.shard_mesh_dim is not None else 1
    replicas = mesh.mesh.size(mesh.replicate_mesh_dim) if mesh.replicate_mesh_dim is not None else 1
    trained = [param for param in params if param.sharded_param.requires_grad]
    stored = (trained or params)[0].sharded_param.dtype
    sizes = [param.padded_sharded_param_size.numel() for param in params]
    dtypes = [_gathered_in(param, policy) for param in params]
    return ShardUnit(
        name=name,
        engine="fsdp2",
        stored=stored,
        gathered=dtypes[0] if len({*dtypes}) == 1 else torch.uint8,
        reduced=(policy.reduce_dtype or _reduced_by_default(stored, policy)) if trained else None,
        parameters=sum(param._orig_size.numel() for param in params),
        elements=ranks * sum(sizes),
        gathered_bytes=ranks * sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True)),
        trained=ranks * sum(param.padded_sharded_param_size.numel() for param in trained),
        local_bytes=sum(_bytes(param.sharded_param) for param in params),
        shard_ranks=ranks,
        replicas=replicas,
        is_gathered_again=_is_gathered_again(state, group, is_root=is_root),
    )


def _gathered_in(param: Any, policy: Any) -> torch.dtype:
    own = getattr(param, "mp_policy", policy)  # of the parameter, where torch has dtypes by parameter
    dtype: torch.dtype = own.param_dtype or param.sharded_param.dtype
    return dtype


def _reduced_by_default(stored: torch.dtype, policy: Any) -> torch.dtype:
    """Return what gradients are reduced in where nobody said: newer torch follows the stored dtype."""
    dtype: torch.dtype = stored if has_dtypes_by_parameter() else policy.param_dtype or stored
    return dtype


def _is_gathered_again(state: Any, group: Any, *, is_root: bool) -> bool:
    """Whether forward frees the weights; where nobody said so, the root keeps them."""
    kept_by_root = is_root and getattr(state, "_auto_reshard_after_forward", False)
    return group.post_forward_mesh_info is not None and not kept_by_root


# -- FSDP1, DDP and nothing ----------------------------------------------------------------------


def _fsdp1(name: str, module: Any, *, is_root: bool) -> ShardUnit | None:
    from torch.distributed.fsdp import ShardingStrategy

    flat = module._flat_param
    if flat is None:
        return None
    policy, strategy = module.mixed_precision, module.sharding_strategy
    whole = strategy is ShardingStrategy.NO_SHARD
    ranks = 1 if whole else module.process_group.size()
    hybrid = getattr(module, "_inter_node_pg", None)
    replicas = module.process_group.size() if whole else hybrid.size() if hybrid is not None else 1
    gathered = policy.param_dtype or flat.dtype
    again = strategy in {ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD}
    elements = ranks * flat._sharded_size.numel()
    return ShardUnit(
        name=name,
        engine="fsdp1",
        stored=flat.dtype,
        gathered=gathered,
        reduced=(policy.reduce_dtype or gathered) if flat.requires_grad else None,
        parameters=sum(size.numel() for size in flat._shapes),
        elements=elements,
        gathered_bytes=elements * gathered.itemsize,
        trained=elements,
        local_bytes=_bytes(flat),
        shard_ranks=ranks,
        replicas=replicas,
        is_gathered_again=again and not is_root,
    )


def _ddp(name: str, module: Any) -> ShardUnit:
    return _plain_unit(name, "ddp", list(module.parameters()), replicas=module.process_group.size())


def _whole(model: nn.Module) -> ShardUnit | None:
    params = list(model.parameters())
    return _plain_unit("", "none", params) if params else None


def _plain_unit(name: str, engine: Engine, params: Sequence[Tensor], *, replicas: int = 1) -> ShardUnit:
    trained = [param for param in params if param.requires_grad]
    elements, stored = sum(local_of(param).numel() for param in params), (trained or params)[0].dtype
    return ShardUnit(
        name=name,
        engine=engine,
        stored=stored,
        gathered=stored,
        reduced=stored if trained and engine == "ddp" else None,
        parameters=elements,
        elements=elements,
        gathered_bytes=elements * stored.itemsize,
        trained=sum(local_of(param).numel() for param in trained),
        local_bytes=sum(map(_bytes, params)),
        replicas=replicas,
    )


def _bytes(tensor: Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()
