"""What torch's FSDP is told for a plan of dtypes: ``fully_shard``, and FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp

from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.weights.ddp import refuse_sharded
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.store import store_weights

_OVERRIDE = "param_dtype_override_fn"


def fully_shard(
    model: nn.Module,
    plan: DtypePlan,
    *,
    units: Iterable[nn.Module] = (),
    root: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model by torch's ``fully_shard``, with the dtypes of a plan; run it under ``autocast``.

    With ``plan.weights`` all weights that are gathered in 16 bits are stored in 16 bits, exactly. For
    an optimizer with ``state=`` call ``store_weights(model, optimizer, weights=..., state=...)`` afterwards.

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
    chosen = {*units, model}
    _refuse_misfits(model, chosen, root or model, options)
    in_fp32 = plan.in_fp32(root or model)
    apply_fp32_modules(root or model, plan.fp32_modules)
    found = [module for module in model.modules() if module in chosen]  # the same order on all ranks
    for module in sorted(found, key=lambda unit: sum(1 for _ in unit.modules())):  # from the inside out
        if not isinstance(module, fsdp.FSDPModule):
            shard_unit(fsdp.fully_shard, module, plan, in_fp32, mp_policy=policy_of(plan), **options)
    if plan.weights != "fp32":
        store_weights(model, weights=plan.weights)
    return model


def shard_unit(
    shard: Callable[..., Any],
    unit: Any,
    plan: DtypePlan,
    in_fp32: set[nn.Module],
    *,
    mp_policy: fsdp.MixedPrecisionPolicy,
    **options: Any,
) -> Any:
    """Shard a module, or a list of modules that travel together; those in fp32 become units where need be."""
    members = unit if isinstance(unit, list) else [unit]
    apart = _outermost(members, in_fp32)
    if has_dtypes_by_parameter():  # torch keeps a weight in the dtype it is stored in, or lowers it
        beside = [m for m in apart if m not in members and HALVES.isdisjoint(p.dtype for p in m.parameters())]
        apart = [module for module in apart if module not in beside]
        kept = {id(param) for module in beside for param in module.parameters()}
        override: dict[str, Any] = {_OVERRIDE: lambda param: torch.float32 if id(param) in kept else None}
        mp_policy = replace(mp_policy, **override) if kept else mp_policy
    for module in apart:
        if not isinstance(module, fsdp.FSDPModule):
            shard(module, mp_policy=policy_of(plan, in_fp32=True), **options)
    rest = [member for member in members if not isinstance(member, fsdp.FSDPModule)]
    return shard(rest if isinstance(unit, list) else unit, mp_policy=mp_policy, **options) if rest else unit


def policy_of(
    plan: DtypePlan, *, in_fp32: bool = False, output_dtype: torch.dtype | None = None
) -> fsdp.MixedPrecisionPolicy:
    """Return torch's policy for a module of a plan; inputs stay as they are, labels too."""
    return fsdp.MixedPrecisionPolicy(
        param_dtype=torch.float32 if in_fp32 else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        output_dtype=output_dtype,
        cast_forward_inputs=False,
    )


def has_dtypes_by_parameter() -> bool:
    """Return whether torch gathers weights of several dtypes in one unit, as bytes: from 2.15 on."""
    return any(field.name == _OVERRIDE for field in fields(fsdp.MixedPrecisionPolicy))


def _outermost(modules: Iterable[nn.Module], in_fp32: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules in fp32 that have weights, in the order of the model."""
    found = []
    for module in modules:
        if module not in in_fp32:
            found += _outermost(module.children(), in_fp32)
        elif any(True for _ in module.parameters()):
            found.append(module)
    return found


def _refuse_misfits(
    model: nn.Module, chosen: set[nn.Module], root: nn.Module, options: dict[str, Any]
) -> None:
    msg, outside = "", chosen - {*model.modules()}
    if "mp_policy" in options:
        msg = "mp_policy is made from the plan; give DtypePlan(compute=..., reduce=...) instead"
    elif model not in {*root.modules()}:
        msg = f"root={type(root).__name__} does not hold this {type(model).__name__}; leave it out"
    elif outside:
        unit, name = type(outside.pop()).__name__, type(model).__name__
        msg = f"a {unit} among units is not a module of {name}; give its own, as in units=model.layers"
    if msg:
        msg = f"fully_shard: {msg}"
        raise ValueError(msg)


# -- FSDP's first version ------------------------------------------------------------------------


def fsdp1_policy(plan: DtypePlan) -> fsdp.MixedPrecision:
    """Return FSDP1's policy for a plan: one dtype for all weights, so with ``fp32_modules`` it is fp32."""
    refuse_sharded(plan.weights, f"precision {plan.compute!r}, in which they are gathered")
    return fsdp.MixedPrecision(
        param_dtype=torch.float32 if plan.fp32_modules else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        buffer_dtype=torch.float32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def add_up_in_fp32(model: nn.Module) -> None:
    """Add gradients under ``no_sync()`` up in fp32 where that reduces them, not in what weights travel in."""
    for module in fsdp.FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None and flat.requires_grad and module.mixed_precision.reduce_dtype is torch.float32:
            flat.grad_dtype = torch.float32
