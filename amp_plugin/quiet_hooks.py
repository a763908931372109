"""Hooks before an optimizer step that only look at the optimizer.

Steps in one pass, and fused steps whose kernel divides the gradients, run no hooks before the step: at that
time the gradients still carry the loss scale. Therefore an unknown hook prevents both kinds of step. A hook
that neither reads gradients nor changes the optimizer is registered here. It prevents neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_quiet: set[int] = set()  # ids of the handles; torch never uses an id twice


def register_quiet_hook(optimizer: Optimizer | None, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that runs before an optimizer step. Our own kinds of step may leave it out.

    Args:
        optimizer: The optimizer; None for all optimizers.
        hook: A hook as for :meth:`torch.optim.Optimizer.register_step_pre_hook`.

    Returns:
        A handle that removes the hook.
    """
    if optimizer is None:
        handle = register_optimizer_step_pre_hook(hook)
    else:
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if type(hooks) is dict:  # some optimizers make a plain dict, which a handle cannot refer to
            optimizer._optimizer_step_pre_hooks = OrderedDict(hooks)
        handle = optimizer.register_step_pre_hook(hook)
    _quiet.add(handle.id)
    return handle


def has_only_quiet_hooks(optimizer: Optimizer) -> bool:
    """Return whether all hooks before an optimizer's step are quiet. A wrapper may lack the dict of hooks."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return all(key in _quiet for key in chain(_global_optimizer_pre_hooks, own))
