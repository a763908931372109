"""Where the engine that shards a model was told other dtypes than the plan."""

from __future__ import annotations

import torch
from torch import nn

from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.sharding.shard_units import ShardUnit, clean_name, shard_units
from amp_plugin.user_warnings import warn_user

_HALVES = {torch.float16, torch.bfloat16}
_SET = {
    "fsdp2": "MixedPrecisionPolicy(reduce_dtype=torch.float32), or amp_plugin.fully_shard(model, plan)",
    "fsdp1": "MixedPrecision(reduce_dtype=torch.float32), or leave the policy out",
}


def check_against_plan(model: nn.Module, plan: DtypePlan) -> None:
    """Compare what FSDP was told with a plan, before training starts.

    Args:
        model: Sharded by the user's own calls, or with a policy of the user's; else nothing happens.
        plan: The dtypes that were asked for.

    Raises:
        ValueError: The weights of a module in ``fp32_modules`` would be gathered in 16 bits.
    """
    units = [unit for unit in shard_units(model) if unit.engine in _SET]
    if not units:
        return
    _refuse_rounded_weights(model, plan, units)
    rounded = [unit for unit in units if unit.reduced in _HALVES and plan.reduce == "fp32"]
    if rounded:
        unit = rounded[0]
        warn_user(
            f"{len(rounded)} of {len(units)} units of {type(model).__name__}, {unit.name or 'the model'!r} "
            f"the first, reduce gradients in {unit.reduced}, as their own policy says, while reduce='fp32': "
            f"use {_SET[unit.engine]}, or say reduce='bf16'"
        )


def _refuse_rounded_weights(model: nn.Module, plan: DtypePlan, units: list[ShardUnit]) -> None:
    if not plan.fp32_modules:
        return
    of_modules = {clean_name(name): dtypes for name, dtypes in plan.modules(model).items()}
    for name, param in model.named_parameters():
        owner = clean_name(name).rpartition(".")[0]
        unit = _unit_of(owner, units)
        if of_modules[owner].compute is torch.float32 and unit is not None and unit.gathered in _HALVES:
            msg = (
                f"fp32_modules names {owner!r}, but the {unit.engine} unit {unit.name or 'model'!r} gathers "
                f"its {tuple(param.shape)} {name.rpartition('.')[2]} in {unit.gathered}: shard with "
                "amp_plugin.fully_shard(model, plan), which gives it a unit in fp32, or leave param_dtype out"
            )
            raise ValueError(msg)


def _unit_of(owner: str, units: list[ShardUnit]) -> ShardUnit | None:
    """Return the innermost unit that holds a module."""
    holders = [unit for unit in units if not unit.name or f"{owner}.".startswith(f"{unit.name}.")]
    return max(holders, key=lambda unit: len(unit.name), default=None)
