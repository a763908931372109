"""Parameters whose memory FSDP frees and refills: their casts are never kept."""

from __future__ import annotations

import torch


def is_managed_by_fsdp(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a parameter of a module under FSDP2 (``fully_shard``).

    Found by the module, not by the tensor: while unsharded it is a plain leaf parameter, at an
    address that comes back and with a version counter that stands still. FSDP1's unsharded
    parameters are views, which are never kept anyway.

    Args:
        tensor: any tensor.
    """
    from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415 - loads torch.distributed
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    sharded = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    seen: set[torch.nn.Module] = set()  # the root holds the others
    modules = (module for outer in sharded for _, module in outer.named_modules(memo=seen))
    return any(parameter is tensor for module in modules for parameter in module._parameters.values())
