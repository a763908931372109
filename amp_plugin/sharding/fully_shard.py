"""FSDP2 by a plan of dtypes: torch's ``fully_shard`` with the policy each module needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.sharding.unit_policies import (
    apart_and_beside,
    bottom_up,
    fp32_units,
    mp_policy,
    with_fp32_parameters,
)
from amp_plugin.weights.store import refuse_sharded_weights


def fully_shard(
    model: nn.Module,
    plan: DtypePlan,
    *,
    units: Iterable[nn.Module] = (),
    root: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model by torch's ``fully_shard``, with the dtypes of a plan; run it under ``autocast``.

    Each of ``units`` becomes a unit of its own, as do ``fp32_modules`` with weights of their own where torch
    gathers a unit in one dtype, which it does before 2.15. Modules are sharded from the inside out, the
    model last. Gradients of micro-batches add up in the dtype of the reduction, also with
    ``set_requires_gradient_sync(False)``.

    Args:
        model: Changed in place; make its optimizer afterwards. Modules sharded already stay as they are.
        plan: Its dtypes. Inputs are not cast where a unit begins: the region casts what each op needs.
        units: Modules of the model, usually its layers: each is gathered when it runs.
        root: The model that the names in ``plan.fp32_modules`` start from, if it is not this one.
        **options: torch's: ``mesh``, ``reshard_after_forward``, ``offload_policy``, ...

    Returns:
        The model.

    Raises:
        ValueError: A pattern matches no module, a unit is not in the model, or ``mp_policy`` is given.
        TypeError: The plan stores weights in 16 bits.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> plan = DtypePlan(compute="bf16", fp32_modules=["LayerNorm"])
        >>> model = fully_shard(model, plan, mesh=mesh)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> dist.destroy_process_group()
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 -- loads torch.distributed
    from torch.distributed.fsdp import fully_shard as shard  # noqa: PLC0415

    _refuse_policy(options)
    refuse_sharded_weights(plan.weights)
    in_fp32 = modules_in_fp32(model, plan, root)
    units = list(units)
    _require_inside(model, units)
    apply_fp32_modules(root or model, plan.fp32_modules)
    apart, beside = apart_and_beside(fp32_units(model, in_fp32))
    policy = with_fp32_parameters(mp_policy(plan), beside)
    for module in bottom_up(model, {*units, *apart, model}):
        if not isinstance(module, FSDPModule):
            shard(module, mp_policy=mp_policy(plan, in_fp32=True) if module in in_fp32 else policy, **options)
    return model


def modules_in_fp32(model: nn.Module, plan: DtypePlan, root: nn.Module | None = None) -> set[nn.Module]:
    """Return the modules that a plan keeps in fp32.

    Args:
        model: The one that is sharded.
        plan: Its dtypes.
        root: The model that the names in the plan start from, if it is not this one.

    Raises:
        ValueError: A pattern matches no module, or ``root`` does not hold the model.
    """
    modules = dict((root or model).named_modules(remove_duplicate=False))
    if model not in modules.values():
        msg = (
            f"fully_shard: root={type(root).__name__} does not hold this {type(model).__name__}; leave it out"
        )
        raise ValueError(msg)
    planned = plan.modules(root or model)
    return {modules[name] for name, dtypes in planned.items() if dtypes.compute is torch.float32}


def _refuse_policy(options: Mapping[str, Any]) -> None:
    if "mp_policy" in options:
        msg = "fully_shard: mp_policy is made from the plan; give DtypePlan(compute=..., reduce=...) instead"
        raise ValueError(msg)


def _require_inside(model: nn.Module, units: Iterable[nn.Module]) -> None:
    inside = set(model.modules())
    for unit in units:
        if unit not in inside:
            msg = (
                f"fully_shard: a {type(unit).__name__} among units is no module of {type(model).__name__}; "
                "give modules it holds, for example units=model.layers"
            )
            raise ValueError(msg)
