"""The parts of a model whose weights travel together, as torch has set them up.

What torch keeps of ``fully_shard`` and of FullyShardedDataParallel is read here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

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
        local_bytes: Of what this rank stores of its weights.
    """

    name: str
    engine: Engine
    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    parameters: int
    local_bytes: int


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return the units of a model, those that hold others last but one: the model itself is the last.

    Args:
        model: With its wrapper. Weights outside of units count as one unit that nothing reduces.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    named = {module: clean_name(name) for name, module in model.named_modules()}
    units = [_fsdp2(named[m], m) for m in named if isinstance(m, FSDPModule)]
    units += [_fsdp1(named[m], m) for m in named if isinstance(m, FullyShardedDataParallel)]
    if not units:
        wrappers = [module for module in named if isinstance(module, DistributedDataParallel)]
        units = [_ddp(named[wrapper], wrapper) for wrapper in wrappers] or [_whole(model)]
    return [unit for unit in reversed(units) if unit is not None]


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP, of either version, shards a model or a part of it."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # noqa: PLC0415

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


def clean_name(name: str) -> str:
    """Return a module's name without those of wrappers: as it is in the model that was wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


# -- FSDP2 ---------------------------------------------------------------------------------------


def _fsdp2(name: str, module: Any) -> ShardUnit | None:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    params = [param for group in groups if group is not None for param in group.fsdp_params]
    if not params:
        return None
    policy = state._mp_policy
    trained = [param for param in params if param.sharded_param.requires_grad]
    stored = (trained or params)[0].sharded_param.dtype
    dtypes = [_gathered_in(param, policy) for param in params]
    return ShardUnit(
        name=name,
        engine="fsdp2",
        stored=stored,
        gathered=dtypes[0] if len({*dtypes}) == 1 else torch.uint8,
        reduced=(policy.reduce_dtype or _reduced_by_default(stored, policy)) if trained else None,
        parameters=sum(param._orig_size.numel() for param in params),
        local_bytes=sum(_bytes(param.sharded_param) for param in params),
    )


def _gathered_in(param: Any, policy: Any) -> torch.dtype:
    own = getattr(param, "mp_policy", policy)  # of the parameter, where torch has dtypes by parameter
    dtype: torch.dtype = own.param_dtype or param.sharded_param.dtype
    return dtype


def _reduced_by_default(stored: torch.dtype, policy: Any) -> torch.dtype:
    """Return what gradients are reduced in where nobody said: newer torch follows the stored dtype."""
    dtype: torch.dtype = stored if has_dtypes_by_parameter() else policy.param_dtype or stored
    return dtype


# -- FSDP1, DDP and nothing ----------------------------------------------------------------------


def _fsdp1(name: str, module: Any) -> ShardUnit | None:
    flat = module._flat_param
    if flat is None:
        return None
    policy = module.mixed_precision
    gathered = policy.param_dtype or flat.dtype
    return ShardUnit(
        name=name,
        engine="fsdp1",
        stored=flat.dtype,
        gathered=gathered,
        reduced=(policy.reduce_dtype or gathered) if flat.requires_grad else None,
        parameters=sum(size.numel() for size in flat._shapes),
        local_bytes=_bytes(flat),
    )


def _ddp(name: str, module: Any) -> ShardUnit:
    return _plain_unit(name, "ddp", list(module.parameters()))


def _whole(model: nn.Module) -> ShardUnit | None:
    params = list(model.parameters())
    return _plain_unit("", "none", params) if params else None


def _plain_unit(name: str, engine: Engine, params: Sequence[Tensor]) -> ShardUnit:
    trained = [param for param in params if param.requires_grad]
    elements, stored = sum(local_of(param).numel() for param in params), (trained or params)[0].dtype
    return ShardUnit(
        name=name,
        engine=engine,
        stored=stored,
        gathered=stored,
        reduced=stored if trained and engine == "ddp" else None,
        parameters=elements,
        local_bytes=sum(map(_bytes, params)),
    )


def _bytes(tensor: Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()
