"""Reads and changes torch's private records (``FSDPParam``) of weights that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from amp_plugin.weights.compressed_state import ask_for, asked_for
from amp_plugin.weights.formats import FORMATS
from amp_plugin.weights.shard import StoredShard
from amp_plugin.weights.weight import is_sharded, stored_weight, widen_

_SHARDS_ONE: Final = "_init_sharded_param"  # torch's method that shards one parameter


def is_unit(module: nn.Module) -> bool:
    """Return whether torch's ``fully_shard`` was called for this module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def weights_of_unit(unit: Any) -> list[Any]:
    """Return torch's records (``FSDPParam``) of the weights that one FSDP2 unit gathers."""
    state = unit._get_fsdp_state()
    # Before torch 2.12 an FSDP2 unit has one parameter group. From torch 2.12 on, it can have several.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [weight for group in groups if group is not None for weight in group.fsdp_params]


def policy_of_weight(unit: Any, weight: Any) -> Any:
    """Return the mixed-precision policy of one weight.

    Before torch 2.15, a policy belongs to an FSDP2 unit and not to a single weight.
    """
    return getattr(weight, "mp_policy", unit._get_fsdp_state()._mp_policy)


def gathered_dtypes(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return a dict from each sharded parameter to the dtype in which FSDP2 gathers it.

    FSDP2 units whose weights are currently gathered are resharded first, so that their parameters are shards
    again.
    """
    return {
        weight.sharded_param: policy_of_weight(unit, weight).param_dtype or weight.sharded_param.dtype
        for unit in _units(model)
        for weight in weights_of_unit(unit)
    }


def notice_new_shards(model: nn.Module) -> None:
    """Make FSDP2 reread the local shards of its weights after some of them were replaced."""
    for unit in _units(model):
        for weight in weights_of_unit(unit):
            weight.reset_sharded_param()
            weight._init_extensions()  # noqa: SLF001 - torch does both before the first forward


@cache
def carry_into_shards() -> None:
    """Make ``fully_shard`` keep the remainders (low-order bits) of stored weights.

    Further calls to ``carry_into_shards`` have no effect.

    ``fully_shard`` makes a new parameter from each weight. Without ``carry_into_shards``, ``fully_shard``
    would use only the 16-bit weight and lose the remainder.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param  # noqa: PLC0415 - half a second

    torchs: Any = _fsdp_param.FSDPParam
    setattr(torchs, _SHARDS_ONE, _carrying(getattr(torchs, _SHARDS_ONE)))


def _carrying(shard: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's method that shards one parameter, so that it also supports stored parameters."""

    @wraps(shard)
    def shard_stored(record: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        weight, form = stored_weight(param), asked_for(param)
        if weight is not None and record.mp_policy.param_dtype is not FORMATS[weight.name].dtype:
            # FSDP2 gathers the weight in a different dtype from the one in which it is stored.
            widen_(param)
            weight = None
        given = param
        if weight is not None and not is_sharded(param):
            both = StoredShard(param.detach(), weight.kept, weight.name, weight.seed)
            given = nn.Parameter(both, param.requires_grad)
        shard(record, given, *args, **kwargs)
        if given is not param:
            # Torch marks shared parameters with an attribute, which the new parameter must keep.
            vars(param).update(vars(given))
        ask_for([record.sharded_param], form or "fp32")

    return shard_stored


def _units(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if is_unit(module):
            module.reshard()  # type: ignore[operator]
            yield module
