"""Passes unscaled gradients to gradient hooks.

Torch runs gradient hooks while gradients are still multiplied by the loss scale. Tools that plot gradients
from hooks, such as ``wandb.watch``, therefore show values that are too large (initially by a factor of 65
536) and that jump when the loss scale changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from amp_plugin.patches import replaced

# Each method that registers hooks, with the index of the argument that a hook's return value replaces.
_REGISTER: Final = (
    (Tensor, "register_hook", 0),
    (nn.Module, "register_full_backward_hook", 1),
    (nn.Module, "register_full_backward_pre_hook", 1),
)


@contextmanager
def unscaled_hooks(scaler: Any) -> Iterator[None]:
    """Pass unscaled gradients to all gradient hooks that are registered inside the block.

    If a hook returns a gradient or changes it in place, the result is multiplied by the loss scale before the
    backward pass continues. Hooks that are registered outside the block are not affected. The block only has
    to be open while hooks are registered, not during training.

    The block affects ``register_hook`` of tensors, and ``register_full_backward_hook`` and
    ``register_full_backward_pre_hook`` of modules. Hooks registered with
    ``register_post_accumulate_grad_hook`` still see the scaled ``.grad``. Float16 gradients are passed as
    float32, so that small numbers are not lost. Every backward pass that reaches the hooks must start from a
    loss that was scaled with the default loss scale. The hooks cause no host sync.

    Args:
        scaler: The holder of the loss scale, which is a GradScaler of amp_plugin or torch, a plugin for
            Fabric or the Trainer, or an AmpAccelerator. If the scaler is disabled, the hooks receive
            unchanged gradients.

    Example:
        >>> from amp_plugin import GradScaler, unscaled_hooks
        >>> model, scaler = nn.Linear(2, 1), GradScaler("cpu")
        >>> seen = []
        >>> with unscaled_hooks(scaler):
        ...     _ = model.weight.register_hook(seen.append)
        >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> seen[0].tolist()
        [[1.0, 1.0]]
    """

    def scale_of() -> Tensor | None:
        present = getattr(scaler, "scaler", scaler)  # frameworks may set it later
        return present._scale if present is not None and present.is_enabled() else None

    with ExitStack() as undo:
        for owner, name, changed in _REGISTER:
            undo.enter_context(replaced(owner, name, _registering(getattr(owner, name), scale_of, changed)))
        yield


def _registering(
    register: Callable[..., Any], scale_of: Callable[[], Tensor | None], changed: int
) -> Callable[..., Any]:
    """Return a version of ``register`` that passes unscaled gradients to the registered hooks."""

    @functools.wraps(register)
    def registered(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return register(owner, _unscaled(hook, scale_of, changed), *args, **kwargs)

    return registered


def _unscaled(
    hook: Callable[..., Any], scale_of: Callable[[], Tensor | None], changed: int
) -> Callable[..., Any]:
    """Return a hook that divides gradients by the loss scale and passes them to ``hook``."""

    @functools.wraps(hook)
    def unscaled(*args: Any) -> Any:
        scale = scale_of()
        if scale is None:
            return hook(*args)
        seen = tree_map_only(Tensor, lambda grad: _wide(grad) / scale.to(grad.device), args)
        result = hook(*seen)
        if result is None and isinstance(seen[0], Tensor) and seen[0]._version:
            result = seen[0]  # changed in place
        return None if result is None else _scaled(result, args[changed], scale)

    return unscaled


def _wide(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype is torch.float16 else grad


def _scaled(result: Any, given: Any, scale: Tensor) -> Any:
    """Return a hook's result multiplied by the loss scale, in the dtype of the original gradient."""
    if isinstance(result, Tensor):
        first = given if isinstance(given, Tensor) else next(grad for grad in given if grad is not None)
        product: Tensor = result * scale.to(result.device)
        return product.to(first.dtype)
    return tuple(
        None if made is None else _scaled(made, grad, scale) for made, grad in zip(result, given, strict=True)
    )
