"""Sets up torch's ``fully_shard`` (FSDP2) and FullyShardedDataParallel (FSDP1) for a plan of dtypes."""

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
    """Shard a model with torch's ``fully_shard``, in the dtypes of a plan.

    Run the sharded model under ``autocast``. Each module in ``units`` becomes a separate FSDP unit, and the
    whole model is sharded last. Before torch 2.15 all weights of a unit are gathered in one dtype, so
    ``fp32_modules`` become separate units too. Gradients of micro-batches are summed in the dtype in which
    they are reduced, even after ``set_requires_gradient_sync(False)``.

    If ``plan.weights`` is not ``"fp32"``, ``fully_shard`` calls ``store_weights`` to convert weights to the
    format ``plan.weights``. Only weights that are gathered in 16 bits are converted. To also compress the
    optimizer's state, call ``store_weights(model, optimizer, weights=..., state=...)`` afterwards.

    Args:
        model: The model, which is changed in place. Create its optimizer afterwards. Modules that are already
            sharded do not change.
        plan: The plan of dtypes. FSDP does not cast the inputs of units, because autocast casts the inputs of
            each op.
        units: The modules that become FSDP units, usually the layers of the model. A unit's weights are
            gathered when the unit runs.
        root: The model to which the names in ``plan.fp32_modules`` refer, if it is not ``model``.
        **options: Options of torch's ``fully_shard``, such as ``mesh``, ``reshard_after_forward`` and
            ``offload_policy``.

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
    # The order must be the same on all ranks. Unlike a set, model.modules() has a fixed order.
    found = [module for module in model.modules() if module in chosen]
    # Smaller modules come first, so that submodules are sharded before their parents.
    for module in sorted(found, key=lambda unit: sum(1 for _ in unit.modules())):
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
    """Shard a module, or a list of modules, as one FSDP unit.

    Modules that stay in fp32 become separate units if torch gathers each unit in one dtype, or if their
    weights are already stored in 16 bits.
    """
    members = unit if isinstance(unit, list) else [unit]
    apart = _outermost(members, in_fp32)
    if has_dtypes_by_parameter():
        # From torch 2.15 on, one FSDP unit can gather some weights in float32 and others in 16 bits.
        # So fp32 modules whose weights are stored in float32 need no FSDP unit of their own.
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
    """Return FSDP2's mixed-precision policy for a plan. Inputs are not cast, so labels keep their dtype."""
    return fsdp.MixedPrecisionPolicy(
        param_dtype=torch.float32 if in_fp32 else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        output_dtype=output_dtype,
        cast_forward_inputs=False,
    )


def has_dtypes_by_parameter() -> bool:
    """Return whether torch can gather weights of several dtypes in one FSDP unit (from torch 2.15 on)."""
    return any(field.name == _OVERRIDE for field in fields(fsdp.MixedPrecisionPolicy))


def _outermost(modules: Iterable[nn.Module], in_fp32: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost fp32 modules that have weights, in the order of the model."""
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


# -- FullyShardedDataParallel (FSDP1) --


def fsdp1_policy(plan: DtypePlan) -> fsdp.MixedPrecision:
    """Return FSDP1's mixed-precision policy for a plan.

    FSDP1 gathers all weights in one dtype, which is float32 if the plan has ``fp32_modules``.
    """
    refuse_sharded(plan.weights, f"precision {plan.compute!r}, in which they are gathered")
    return fsdp.MixedPrecision(
        param_dtype=torch.float32 if plan.fp32_modules else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        buffer_dtype=torch.float32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def add_up_in_fp32(model: nn.Module) -> None:
    """Make FSDP1 accumulate gradients under ``no_sync()`` in fp32 if it reduces them in fp32.

    By default FSDP1 accumulates gradients in the dtype in which it gathers the weights.
    """
    for module in fsdp.FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None and flat.requires_grad and module.mixed_precision.reduce_dtype is torch.float32:
            flat.grad_dtype = torch.float32
