"""Optimizers that step stored weights and were not handed to their store: taken at their first step.

They would step the 16 bits, without a word. torch runs a hook of ours before each step of every optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.optimizer_view import view_of


def expect_optimizers(is_stored: Callable[[Tensor], bool], add: Callable[[Optimizer], None]) -> None:
    """Hand optimizers over before they step a stored weight for the first time.

    Args:
        is_stored: A store's method, which tells whether a parameter is one of its weights. The hook is there
            for as long as the store lives, and does not keep it alive.
        add: A method of the same store, which lets an optimizer step masters.
    """
    hook = LateOptimizers(is_stored, add)
    handle = register_optimizer_step_pre_hook(hook)
    finalize(is_stored.__self__, handle.remove)  # type: ignore[attr-defined]


class LateOptimizers:
    """The hook. It changes no gradient, and does nothing to optimizers that step no stored weight.

    Args:
        is_stored: As for :func:`expect_optimizers`.
        add: As for :func:`expect_optimizers`.
    """

    leaves_gradients = True
    leaves_steps = True

    def __init__(self, is_stored: Callable[[Tensor], bool], add: Callable[[Optimizer], None]) -> None:
        self._is_stored, self._add = WeakMethod(is_stored), WeakMethod(add)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hand an optimizer over, with a warning.

        Raises:
            ValueError: It has state in 16 bits by now.
        """
        if torch.compiler.is_compiling() or view_of(optimizer) is not None:
            return
        is_stored, add = self._is_stored(), self._add()
        if is_stored is None or add is None:
            return
        if any(is_stored(param) for group in optimizer.param_groups for param in group["params"]):
            add(optimizer)
            warn_user(
                f"{type(optimizer).__name__} steps weights that are stored in 16 bits, and was not handed to "
                "their store: it is now, and steps float32 masters. Hand it over yourself before it saves or "
                "loads a state dict: store_weights(model, optimizer), or add(optimizer) of what that returns"
            )
