"""The dtypes that Accelerate's FSDP is given: those of the plan, module by module."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from amp_plugin.casting.bound_rules import replaced
from amp_plugin.patterns import found_patterns
from amp_plugin.sharding.fully_shard import fsdp1_policy, policy_of, shard_unit
from amp_plugin.sharding.plan import DtypePlan


def give_policy(plugin: FullyShardedDataParallelPlugin, plan: DtypePlan, *, fp32_outputs: bool) -> None:
    """Replace Accelerate's policy for FSDP, which reduces gradients in 16 bits; not one that the user chose.

    With ``fp32_outputs`` it is not FSDP that casts outputs.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy  # noqa: PLC0415

    dtype = plan.compute_dtype
    if plugin.mixed_precision_policy == MixedPrecision(dtype, dtype, dtype):  # FSDP1's
        plugin.mixed_precision_policy = fsdp1_policy(plan)
    elif plugin.mixed_precision_policy == MixedPrecisionPolicy(dtype, dtype, dtype):
        plugin.mixed_precision_policy = policy_of(plan, output_dtype=None if fp32_outputs else dtype)


@contextmanager
def fp32_units_apart(models: Sequence[nn.Module], plan: DtypePlan) -> Iterator[None]:
    """Let ``fully_shard`` give modules in fp32 units of their own, within the ones that Accelerate makes.

    Accelerate shards with one policy for all, and torch gathers a unit in one dtype.
    """
    from torch.distributed import fsdp  # noqa: PLC0415 -- only FSDP2 users pay for it

    own = fsdp.fully_shard
    in_fp32: set[nn.Module] = set()
    for model in models:
        found = replace(plan, fp32_modules=found_patterns(model, plan.fp32_modules))
        in_fp32 |= found.in_fp32(model)

    @functools.wraps(own)
    def by_plan(module: Any, **options: Any) -> Any:
        return shard_unit(own, module, plan, in_fp32, **options)

    with replaced(fsdp, "fully_shard", by_plan):
        yield
