"""FSDP2 by a plan of dtypes: torch's ``fully_shard`` with the policy each module needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_plugin.casting.fp32_modules import apply_fp32_modules
from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.weights.refusals import refuse_sharded_weights

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fully_shard(
    model: nn.Module,
    plan: DtypePlan,
    *,
    units: Iterable[nn.Module] = (),
    root: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model by torch's ``fully_shard``, with the dtypes of a plan; run it under ``autocast``.

    Each of ``units`` becomes a unit of its own, as do ``fp32_modules`` with weights of their own: torch
    gathers a unit in one dtype. Modules are sharded from the inside out, the model last. Gradients
    of micro-batches add up in the dtype of the reduction, also with ``set_requires_gradient_sync(False)``.

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
    for module in bottom_up(model, {*units, *fp32_units(model, in_fp32), model}):
        if not isinstance(module, FSDPModule):
            shard(module, mp_policy=mp_policy(plan, in_fp32=module in in_fp32), **options)
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


def mp_policy(
    plan: DtypePlan, *, in_fp32: bool = False, output_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    """Return torch's policy for a module of a plan.

    Inputs stay as they are: under autocast each op casts what it needs, and labels keep their bits.

    Args:
        plan: The dtypes.
        in_fp32: Whether the plan keeps the module in fp32.
        output_dtype: That of its outputs; None leaves them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 -- loads torch.distributed

    return MixedPrecisionPolicy(
        param_dtype=torch.float32 if in_fp32 else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        output_dtype=output_dtype,
        cast_forward_inputs=False,
    )


def fp32_units(model: nn.Module, in_fp32: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules in fp32 that have weights, in a model that is not in fp32 as a whole.

    Args:
        model: The one that is sharded.
        in_fp32: All modules in fp32.
    """
    if model in in_fp32:
        return []
    found, waiting = [], [model]
    while waiting:
        for child in waiting.pop().children():
            if child not in in_fp32:
                waiting.append(child)
            elif any(True for _ in child.parameters()):
                found.append(child)
    return found


def bottom_up(model: nn.Module, chosen: set[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules of a model, each after those inside it; the same order on all ranks."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if module in chosen:
            found[module] = None

    visit(model)
    return list(found)


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
