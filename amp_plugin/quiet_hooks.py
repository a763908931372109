"""Registers optimizer pre-step hooks that only observe the optimizer.

In some optimizer steps, the kernel that updates the weights also unscales the gradients. A pre-step hook
would see gradients that are still scaled, so an optimizer step with this kernel runs no pre-step hooks. If an
optimizer has an ordinary pre-step hook, amp_plugin therefore unscales the gradients before the step. If a
hook neither reads gradients nor changes the optimizer, register the hook with :func:`register_quiet_hook`. A
hook registered in this way is called quiet. A quiet hook does not change how the optimizer steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

# The ids of all handles that ``register_quiet_hook()`` has returned. Torch never reuses an id.
_quiet: set[int] = set()


def register_quiet_hook(optimizer: Optimizer | None, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a pre-step hook that amp_plugin may skip, for example in one-pass steps.

    Args:
        optimizer: The optimizer, or None for all optimizers.
        hook: The hook, as for :meth:`torch.optim.Optimizer.register_step_pre_hook`.

    Returns:
        A handle that removes the hook.
    """
    if optimizer is None:
        handle = register_optimizer_step_pre_hook(hook)
    else:
        hooks: Any = optimizer._optimizer_step_pre_hooks
        if type(hooks) is dict:  # handles need an OrderedDict
            optimizer._optimizer_step_pre_hooks = OrderedDict(hooks)
        handle = optimizer.register_step_pre_hook(hook)
    _quiet.add(handle.id)
    return handle


def has_only_quiet_hooks(optimizer: Optimizer) -> bool:
    """Return whether all pre-step hooks of an optimizer were registered by :func:`register_quiet_hook`."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return all(key in _quiet for key in chain(_global_optimizer_pre_hooks, own))
