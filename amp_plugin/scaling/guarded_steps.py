"""Steps under the guard: taken unless a gradient is not finite.

::

    host:    wait for found_inf; step, or do nothing        (on the CPU there is no wait)
    device:  a fused optimizer's kernel skips by found_inf  (no host sync)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from amp_plugin.scaling import guarded_closures, sync_free
from amp_plugin.scaling.closures import take_closure
from amp_plugin.scaling.guard import Check, Guard, given_found_inf, skips_by_itself
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.user_warnings import warn_user


def step(
    guard: Guard, window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Step unless a gradient is not finite.

    Args:
        guard: Looks at the gradients.
        window: The optimizer's.
        optimizer: To call ``step`` of.
        args: For ``optimizer.step``; a callable first one is a closure.
        kwargs: For ``optimizer.step``.

    Returns:
        What ``optimizer.step`` returns; if the host knows that it was skipped, the closure's loss or None.
    """
    if not guard.checks or torch.compiler.is_compiling():
        value = optimizer.step(*args, **kwargs)
        guard.note_taken(window)
        return value
    closure, others, named = take_closure(args, kwargs)
    if closure is not None:
        return guarded_closures.step(guard, window, optimizer, closure, others, named)
    check = guard.check(window)
    if check.found is not None:
        return _step_checked(guard, window, optimizer, check, args, kwargs)
    value = optimizer.step(*args, **kwargs)
    guard.close(window, check, skipped=False)
    return value


def _step_checked(
    guard: Guard,
    window: OptimizerWindow,
    optimizer: Optimizer,
    check: Check,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Skip on the device where the optimizer can, else by the host."""
    found: Any = check.found
    skipped: bool | None = None
    captured = capturing(found.device)
    if skips_by_itself(optimizer, found):
        with given_found_inf(optimizer, found):
            value = optimizer.step(*args, **kwargs)
    elif (guard.sync_free or captured) and sync_free.possible(optimizer, found.device):
        value = sync_free.step(optimizer, found, args, kwargs)
    else:
        if captured:
            _warn_of_capture(optimizer)
        skipped = not captured and bool(found.item() > 0)
        value = None if skipped else optimizer.step(*args, **kwargs)
    guard.close(window, check, skipped=skipped)
    return value


def _warn_of_capture(optimizer: Optimizer) -> None:
    warn_user(
        f"a step of {type(optimizer).__name__} is captured in a CUDA graph before its state exists: its "
        "replays do not skip gradients that are not finite. Step once before the capture, or use fused=True."
    )
