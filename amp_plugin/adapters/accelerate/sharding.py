"""The dtypes that Accelerate's FSDP is given: those of the plan, module by module."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from amp_plugin.adapters.accelerate.settings import Settings
from amp_plugin.adapters.option_checks import refuse_other_eval_precision
from amp_plugin.patterns import found_patterns
from amp_plugin.precision import TRAINING_DTYPES
from amp_plugin.sharding.contradictions import check_against_plan
from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.sharding.fsdp1 import add_up_in_fp32, fsdp1_policy
from amp_plugin.sharding.fully_shard import modules_in_fp32
from amp_plugin.sharding.unit_policies import (
    apart_and_beside,
    bottom_up,
    fp32_units,
    mp_policy,
    with_fp32_parameters,
)
from amp_plugin.user_warnings import warn_user


def plan_of(precision: str, settings: Settings) -> DtypePlan:
    """Return the plan of a run."""
    options = settings.adapter()
    return DtypePlan(
        compute=TRAINING_DTYPES.get(precision, torch.float32),  # type: ignore[arg-type] # a name is made of it
        fp32_modules=options.fp32_modules,
        reduce=options.reduce,
        weights=options.weights,
    )


def give_policy(
    plugin: FullyShardedDataParallelPlugin, plan: DtypePlan, *, version: int, fp32_outputs: bool
) -> None:
    """Replace the policy that Accelerate gives FSDP, which reduces gradients in 16 bits.

    A policy the user chose differs from Accelerate's and is left alone.

    Args:
        plugin: Accelerate's.
        plan: the dtypes.
        version: of FSDP.
        fp32_outputs: whether outputs become fp32, which is not FSDP's task then.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy  # noqa: PLC0415

    dtype = plan.compute_dtype
    if version == 1 and plugin.mixed_precision_policy == MixedPrecision(dtype, dtype, dtype):
        plugin.mixed_precision_policy = fsdp1_policy(plan)
    elif version == 2 and plugin.mixed_precision_policy == MixedPrecisionPolicy(dtype, dtype, dtype):
        plugin.mixed_precision_policy = mp_policy(plan, output_dtype=None if fp32_outputs else dtype)


def check_options(precision: str, settings: Settings, distributed: DistributedType) -> None:
    """Refuse what FSDP cannot do, and warn of what has an effect under FSDP only.

    Raises:
        ValueError: models compute in another precision in ``eval()`` mode.
    """
    options = settings.adapter()
    if distributed == DistributedType.FSDP:
        settings.build(lambda: refuse_other_eval_precision(options.eval_precision, precision))
    elif settings.get("reduce", "fp32") != "fp32":
        warn_user(
            f"reduce={options.reduce!r} has an effect under FSDP only, and this run is {distributed}: "
            "gradients are reduced in the dtype of the weights; for DDP use Accelerate's "
            "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)"
        )


def check_prepared(prepared: Any, plan: DtypePlan) -> None:
    """Compare what shards the prepared models with the plan; let micro-batches add up in fp32.

    Raises:
        ValueError: a model cannot do what was asked for.
    """
    for model in prepared if isinstance(prepared, tuple) else [prepared]:
        if isinstance(model, nn.Module):
            check_against_plan(model, plan)
            add_up_in_fp32(model)


@contextmanager
def fp32_units_apart(models: Sequence[nn.Module], plan: DtypePlan) -> Iterator[None]:
    """Let ``fully_shard`` give modules in fp32 units of their own, within the ones that Accelerate makes.

    Accelerate shards with one policy for all, and torch gathers a unit in one dtype.

    Args:
        models: those that are prepared; each pattern has been found.
        plan: the dtypes.
    """
    from torch.distributed import fsdp  # noqa: PLC0415 -- only FSDP2 users pay for it

    own = fsdp.fully_shard
    found = [
        DtypePlan(compute=plan.compute, fp32_modules=found_patterns(model, plan.fp32_modules))
        for model in models
    ]
    in_fp32 = set().union(*(modules_in_fp32(*pair) for pair in zip(models, found, strict=True)))

    @functools.wraps(own)
    def by_plan(module: Any, **options: Any) -> Any:
        in_fp32_options = {**options, "mp_policy": mp_policy(plan, in_fp32=True)}
        members = module if isinstance(module, list) else [module]
        params: list[nn.Parameter] = []
        for member in members:
            chosen = {member}
            if member not in in_fp32:
                apart, beside = apart_and_beside(fp32_units(member, in_fp32))
                chosen = {*apart}
                params += beside
            for inner in bottom_up(member, chosen):
                if not isinstance(inner, fsdp.FSDPModule):
                    own(inner, **in_fp32_options)
        if params:
            options["mp_policy"] = with_fp32_parameters(options["mp_policy"], params)
        rest = [member for member in members if not isinstance(member, fsdp.FSDPModule)]
        return own(rest if isinstance(module, list) else module, **options) if rest else module

    fsdp.fully_shard = by_plan
    try:
        yield
    finally:
        fsdp.fully_shard = own
