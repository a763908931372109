"""Hooks before an optimizer's step that only look at the optimizer.

A step in one pass, and a step whose kernel divides the gradients, run no hook before them: the gradients
still carry the loss scale then, and torch's own step is not called. So an unknown hook keeps both from being
taken. A hook that neither reads gradients nor changes the optimizer is registered here, and keeps neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_quiet: set[int] = set()  # ids of the handles; torch counts them up and uses none twice


def register_quiet_hook(optimizer: Optimizer | None, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that runs before an optimizer's step, and which steps of ours may leave out.

    Args:
        optimizer: The optimizer; None for all.
        hook: As for :meth:`torch.optim.Optimizer.register_step_pre_hook`.

    Returns:
        A handle that removes it.
    """
    if optimizer is None:
        handle = register_optimizer_step_pre_hook(hook)
    else:
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if type(hooks) is dict:  # some optimizers make a plain one, to which a handle cannot refer
            optimizer._optimizer_step_pre_hooks = OrderedDict(hooks)
        handle = optimizer.register_step_pre_hook(hook)
    _quiet.add(handle.id)
    return handle


def has_only_quiet_hooks(optimizer: Optimizer) -> bool:
    """Whether every hook before an optimizer's step only looks at it; a wrapper may have no hooks at all."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return all(key in _quiet for key in chain(_global_optimizer_pre_hooks, own))
