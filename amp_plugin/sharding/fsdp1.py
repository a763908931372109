"""FullyShardedDataParallel, FSDP's first version, by a plan of dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.weights.ddp import refuse_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision


def fsdp1_policy(plan: DtypePlan) -> MixedPrecision:
    """Return torch's MixedPrecision for a plan.

    Weights are gathered in the dtype of the compute. This version of FSDP has one dtype for all of them, so
    with ``fp32_modules`` they are gathered in fp32, twice the bytes, and the region casts them. Inputs
    stay as they are, and buffers such as the statistics of a batch norm stay in fp32.
    """
    from torch.distributed.fsdp import MixedPrecision  # noqa: PLC0415 -- loads torch.distributed

    refuse_sharded(plan.weights, f"precision {plan.compute!r}, in which they are gathered")
    return MixedPrecision(
        param_dtype=torch.float32 if plan.fp32_modules else plan.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        buffer_dtype=torch.float32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def add_up_in_fp32(model: nn.Module) -> None:
    """Add gradients of micro-batches under ``no_sync()`` up in fp32, where they are reduced in fp32.

    Without it FSDP1 adds them up in the dtype that weights are gathered in.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 -- loads torch.distributed

    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None and flat.requires_grad and module.mixed_precision.reduce_dtype is torch.float32:
            flat.grad_dtype = torch.float32
