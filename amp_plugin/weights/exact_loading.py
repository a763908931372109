"""Load the optimizer's state dict of a run with weights in 16 bits into a run with float32 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from amp_plugin.weights.checkpoint_entry import KEY, exact_value

_ATTRIBUTE = "_amp_plugin_loads_exactly"


def load_exactly(optimizer: Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` add to float32 weights what their 16 bits lack.

    The model's state dict is loaded first: it held the 16 bits. A weight that is not what was saved is left.

    Args:
        optimizer: Of float32 weights; of any class.
    """
    if not getattr(optimizer, _ATTRIBUTE, False):
        setattr(optimizer, _ATTRIBUTE, True)
        optimizer.register_load_state_dict_pre_hook(_before_load)


@torch.no_grad()
def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    entry = state_dict.get(KEY)
    if entry is None:
        return
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    for number, param in enumerate(params):
        if param.dtype is torch.float32 and (exact := exact_value(entry, number, param.detach())) is not None:
            param.copy_(exact)
