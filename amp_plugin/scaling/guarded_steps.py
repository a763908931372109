"""Steps under the guard: taken unless a gradient is not finite.

::

    host:    wait for found_inf; step, or do nothing        (on the CPU there is no wait)
    device:  a fused optimizer's kernel skips by found_inf  (no host sync)

A clip that was left to the step is worked in by a step in one pass, and written before any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from amp_plugin.scaling import guarded_closures, guarded_one_pass, sync_free
from amp_plugin.scaling.closures import Closure, take_closure
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
        window.obstacle = guarded_one_pass.obstacle(guard, window)
        value = optimizer.step(*args, **kwargs)
        guard.note_taken(window)
        return value
    closure, others, named = take_closure(args, kwargs)
    if closure is None:
        return _step_once(guard, window, optimizer, args, kwargs)
    if others or named or guarded_one_pass.obstacle(guard, window):
        return _step_with_closure(guard, window, optimizer, closure, others, named)
    with torch.enable_grad():
        loss = closure()  # what torch's own steps of these optimizers begin with
    _step_once(guard, window, optimizer, (), {})
    return loss


def _step_once(
    guard: Guard, window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Step by the gradients that are there."""
    is_folded = window.unscaled.clip is not None
    check = guarded_one_pass.check(guard, window) if is_folded else guard.check(window)
    if check.found is not None:
        return _step_checked(guard, window, optimizer, check, args, kwargs)
    window.obstacle = "nothing was to be clipped or checked"
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
    """Skip on the device where the optimizer can, else by the host; in one pass where that is possible."""
    found: Any = check.found
    one_pass = guarded_one_pass.collect(guard, window, optimizer, args, kwargs)
    if one_pass is not None:
        skipped = bool(found.item() > 0)
        guarded_one_pass.step(window, one_pass, skipped=skipped)
        guard.close(window, check, skipped=skipped)
        return None
    window.unscaled.write_clip_(window.params)
    return _step_by_torch(guard, window, optimizer, check, args, kwargs)


def _step_by_torch(
    guard: Guard,
    window: OptimizerWindow,
    optimizer: Optimizer,
    check: Check,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
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


def _step_with_closure(
    guard: Guard,
    window: OptimizerWindow,
    optimizer: Optimizer,
    closure: Closure,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Let the optimizer call its closure; a clip that the closure has left to the step is written."""

    def clipped() -> Any:
        loss = closure()
        window.unscaled.write_clip_(window.params)
        return loss

    given = "step() was given arguments" if args or kwargs else ""
    window.obstacle = given or guarded_one_pass.obstacle(guard, window)
    return guarded_closures.step(guard, window, optimizer, clipped, args, kwargs)


def _warn_of_capture(optimizer: Optimizer) -> None:
    warn_user(
        f"a step of {type(optimizer).__name__} is captured in a CUDA graph before its state exists: its "
        "replays do not skip gradients that are not finite. Step once before the capture, or use fused=True."
    )
