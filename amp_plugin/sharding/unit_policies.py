"""The units of FSDP2 that a plan needs, and torch's policy for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_plugin.sharding.dtype_plan import DtypePlan

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_OVERRIDE = "param_dtype_override_fn"


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


def has_dtypes_by_parameter() -> bool:
    """Return whether torch gathers weights of several dtypes in one unit, as bytes: from 2.15 on."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 -- loads torch.distributed

    return any(field.name == _OVERRIDE for field in fields(MixedPrecisionPolicy))


def apart_and_beside(modules: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Sort modules in fp32 into those that need units of their own, and weights gathered beside others.

    Args:
        modules: In fp32; torch keeps a weight in the dtype it is stored in, or lowers it, but raises none.

    Returns:
        The modules, and the weights of the rest, for :func:`with_fp32_parameters`.
    """
    if not has_dtypes_by_parameter():
        return list(modules), []
    apart = [
        module for module in modules if any(param.dtype is not torch.float32 for param in module.parameters())
    ]
    return apart, [param for module in modules if module not in apart for param in module.parameters()]


def with_fp32_parameters(
    policy: MixedPrecisionPolicy, params: Iterable[nn.Parameter]
) -> MixedPrecisionPolicy:
    """Return a policy that gathers some of the weights of a unit in fp32.

    Args:
        policy: That of the unit.
        params: Those weights, stored in fp32; none where torch has no dtypes by parameter.
    """
    in_fp32 = {id(param) for param in params}
    if not in_fp32:
        return policy

    def override(param: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if id(param) in in_fp32 else None

    changed: dict[str, Any] = {_OVERRIDE: override}
    return replace(policy, **changed)
