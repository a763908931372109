"""Steps whose kernel divides gradients and skips: torch's fused optimizers, and steps in one pass.

The kernel divides by what is still in the gradients and does nothing after an overflow, so one read
of the gradients is all that is left to do. torch's kernels take ``optimizer.grad_scale`` and
``optimizer.found_inf``. After a taken step of theirs ``.grad`` is unscaled and clipped (they write
it), after a skipped one it is still scaled: which, only the device knows. A step in one pass never
writes it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amp_plugin.scaling.folded_clip import FoldedClip
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.memory_order import match_memory_order
from amp_plugin.scaling.one_pass import NotInOnePassError, OnePassStep, collect
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.units import UNSCALED
from amp_plugin.user_warnings import warn_user


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step divides by a scale and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether its ``step`` follows the older contract: ``step(grad_scaler=...)`` does everything."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def foldable(window: OptimizerWindow) -> LossScale | None:
    """Return the one loss scale all gradients carry, if the step's kernel may divide by it.

    Not if another optimizer steps some of the parameters too: it would not know whether they
    have been unscaled. Not if a hook runs before the step: it may look at the gradients, unless it says not.
    """
    if window.is_shared or not (is_fused(window.optimizer) or not window.one_pass_obstacle()):
        return None
    hooks = {**getattr(window.optimizer, "_optimizer_step_pre_hooks", {}), **_global_optimizer_pre_hooks}
    if not all(getattr(hook, "leaves_gradients", False) for hook in hooks.values()):
        return None
    scales = {gradients.scaled_by for gradients in window.sets}
    return scales.pop() if len(scales) == 1 else None


def in_one_pass(
    window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> OnePassStep | None:
    """Return a step in one pass, ready to be taken; None if the optimizer's own is to run.

    Notes why in ``window.obstacle``.
    """
    window.obstacle = "step() was given arguments" if args or kwargs else window.one_pass_obstacle()
    if window.obstacle:
        return None
    if foldable(window) is None and not _is_clipped(window):
        window.obstacle = "its gradients are unscaled already, shared, or of several scales"
        return None
    try:
        return collect(optimizer)
    except NotInOnePassError as error:
        window.obstacle = str(error)
        return None


def _is_clipped(window: OptimizerWindow) -> bool:
    """Whether a clip by norm of ours has left all gradients unscaled.

    After ``unscale_`` torch's own step runs, whose bits users may compare. On a GPU torch's fused step reads
    and writes as little.
    """
    on_host = all(param.is_cpu for param in window.params[:1])
    unscaled = all(gradients.unit is UNSCALED for gradients in window.sets)
    return window.is_clipped and unscaled and on_host and not window.is_shared


def step_in_one_pass(
    window: OptimizerWindow, optimizer: Optimizer, one_pass: OnePassStep, *, waits: bool
) -> None:
    """Step in one pass over gradients, weights and state.

    With ``waits`` learn first whether it is skipped, and then run no hooks, as an optimizer's own step would.
    """
    loss_scale, clip, norm, found = _checked(window)
    skipped = bool(found.item() > 0) if waits else None
    given: Tensor | None = getattr(optimizer, "grad_scale", None)
    divisor = given if loss_scale is None else _divisor(loss_scale, clip, given)
    if not skipped:
        one_pass.take(divisor, found)
    if loss_scale is not None and divisor is not None:
        scale = loss_scale.snapshot()
        for gradients in window.sets:
            gradients.leave_to_fused_step(scale, found, scale if divisor is loss_scale.value else divisor)
    window.close(norm, found, known=skipped)


def step(window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step an optimizer with AMP support; no host sync."""
    loss_scale, clip, norm, found = _checked(window)
    if not window.has_momentum:
        without = without_momentum(optimizer)
        window.has_momentum = not without
        if any(param.grad is not None for param in without) and found.item() > 0:
            _leave(window, found)
            window.close(norm, found, known=True)
            return None
    given: Tensor | None = getattr(optimizer, "grad_scale", None)
    factor = given if loss_scale is None else _divisor(loss_scale, clip, given)
    match_memory_order(optimizer)
    _give_to_kernel(optimizer, factor, found)
    try:
        value = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    _leave(window, found)
    window.close(norm, found, known=None)
    return value


def _checked(window: OptimizerWindow) -> tuple[LossScale | None, FoldedClip | None, Tensor, Tensor]:
    """Measure the gradients; unscale them unless the kernel does. Also returns what is left to the kernel."""
    loss_scale = foldable(window)
    norm_type = 2.0
    if window.clip is not None:
        norm_type = window.clip.norm_type
        _refuse_changed_after_clip(window)
        if loss_scale is None:
            window.clip_again()  # which is written now
    norm, found = window.check(write=loss_scale is None, norm_type=norm_type)
    clip = None if window.clip is None else window.clip_again(norm)
    return loss_scale, clip, norm, found


def step_with_scaler(window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Step an optimizer of the older contract; ``kwargs`` holds ``grad_scaler``."""
    warn_user(
        f"{type(optimizer).__name__}.step takes grad_scaler, which is deprecated; let it read "
        "self.grad_scale and self.found_inf instead.",
        FutureWarning,
    )
    norm, found = window.check(write=False)
    value = optimizer.step(*args, **kwargs)
    _leave(window, found)
    window.close(norm, found, known=None)
    return value


def _refuse_changed_after_clip(window: OptimizerWindow) -> None:
    if any(gradients.is_changed() for gradients in window.sets):
        msg = (
            "gradients were changed between clip_grad_norm_(..., fold=True) and step(): they were still "
            "scaled then. Call it with fold=False, or change them before."
        )
        raise RuntimeError(msg)


def _leave(window: OptimizerWindow, found: Tensor) -> None:
    """Note what scaled gradients carry after the step: nothing if it was taken, the scale if not."""
    for gradients in window.sets:
        loss_scale = gradients.scaled_by
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
