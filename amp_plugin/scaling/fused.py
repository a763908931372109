"""Fused optimizers: unscale, clip and skip inside the optimizer's own kernel.

They divide by ``optimizer.grad_scale`` and do nothing if ``optimizer.found_inf`` is 1, so one
read of the gradients is all that is left to do. After a taken step ``.grad`` is unscaled and
clipped (the kernels write it back), after a skipped one it is still scaled: which, only the
device knows.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amp_plugin.scaling.folded_clip import FoldedClip
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.user_warnings import warn_user


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step divides by a scale and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether its ``step`` follows the older contract: ``step(grad_scaler=...)`` does everything."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def foldable(window: OptimizerWindow) -> LossScale | None:
    """Return the one loss scale all gradients carry, if the optimizer's kernel may divide by it.

    Not if another optimizer steps some of the parameters too: it would not know whether they
    have been unscaled. Not if a hook runs before the step: it may look at the gradients, unless it says not.
    """
    if window.is_shared or not is_fused(window.optimizer):
        return None
    hooks = {**getattr(window.optimizer, "_optimizer_step_pre_hooks", {}), **_global_optimizer_pre_hooks}
    if not all(getattr(hook, "leaves_gradients", False) for hook in hooks.values()):
        return None
    scales = {gradients.scaled_by for gradients in window.sets}
    return scales.pop() if len(scales) == 1 else None


def step(window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step an optimizer with AMP support; no host sync."""
    for gradients in window.sets:
        window.assume_scaled(gradients)
    loss_scale = foldable(window)
    _refuse_changed_after_clip(window)
    clip = window.clip_again()
    norm, found = window.check(write=loss_scale is None, norm_type=2.0 if clip is None else clip.norm_type)
    if not window.has_momentum:
        without = without_momentum(optimizer)
        window.has_momentum = not without
        if any(param.grad is not None for param in without) and found.item() > 0:
            _leave(window, loss_scale, found)
            window.close(norm, found, known=True)
            return None
    given: Tensor | None = getattr(optimizer, "grad_scale", None)
    factor = given if loss_scale is None else _divisor(loss_scale, clip, given)
    _give_to_kernel(optimizer, factor, found)
    try:
        value = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    _leave(window, loss_scale, found)
    window.close(norm, found, known=None)
    return value


def step_with_scaler(window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step an optimizer of the older contract; ``kwargs`` holds ``grad_scaler``."""
    warn_user(
        f"{type(optimizer).__name__}.step takes grad_scaler, which is deprecated; let it read "
        "self.grad_scale and self.found_inf instead.",
        FutureWarning,
    )
    norm, found = window.check(write=False)
    value = optimizer.step(*args, **kwargs)
    for gradients in window.sets:
        _leave_set(gradients, gradients.scaled_by, found)
    window.close(norm, found, known=None)
    return value


def _refuse_changed_after_clip(window: OptimizerWindow) -> None:
    if window.clip is not None and any(gradients.is_changed() for gradients in window.sets):
        msg = (
            "gradients were changed between clip_grad_norm_(..., fold=True) and step(): they were still "
            "scaled then. Call it with fold=False, or change them before."
        )
        raise RuntimeError(msg)


def _leave(window: OptimizerWindow, loss_scale: LossScale | None, found: Tensor) -> None:
    """Note what the gradients carry after a folded step: nothing if it was taken, the scale if not."""
    for gradients in window.sets:
        _leave_set(gradients, loss_scale, found)


def _leave_set(gradients: GradientSet, loss_scale: LossScale | None, found: Tensor) -> None:
    if loss_scale is not None:
        gradients.leave_to_fused_step(loss_scale.snapshot(), found)


def _divisor(loss_scale: LossScale, clip: FoldedClip | None, given: Tensor | None) -> Tensor:
    """What the kernel divides by: scale, clipping, and what the user has set."""
    divisor = loss_scale.require() if clip is None else clip.divisor(loss_scale.require())
    return divisor if given is None else divisor * given


def _give_to_kernel(optimizer: Optimizer, factor: Tensor | None, found: Tensor) -> None:
    """Set what the optimizer's kernel reads; for parameters on the host it must have arrived there.

    torch itself would copy it there without waiting.
    """
    if not found.is_cpu and any(param.is_cpu for param in params_of(optimizer)):
        factor, found = None if factor is None else factor.cpu(), found.cpu()
    optimizer.grad_scale, optimizer.found_inf = factor, found  # type: ignore[attr-defined]


def without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """The parameters whose momentum buffer SGD's kernel would leave uninitialised if it skips.

    torch allocates them with ``empty_like`` at a parameter's first step and returns before writing.
    """
    if not isinstance(optimizer, SGD):
        return []
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
