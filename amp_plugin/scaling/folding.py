"""Fused optimizers: unscale, clip and skip inside the optimizer's own kernel.

They divide by ``optimizer.grad_scale`` and do nothing if ``optimizer.found_inf`` is 1, so one
read of the gradients is all that is left to do. After a taken step ``.grad`` is unscaled and
clipped (the kernels write it back), after a skipped one it is still scaled: which, only the
device knows.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amp_plugin.scaling import stepping
from amp_plugin.scaling.gradient_set import Residue
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.registry import OptimizerRecord

if TYPE_CHECKING:
    from amp_plugin.scaling.optimizer_calls import OptimizerCalls


class FoldedClip(NamedTuple):
    """A clip by norm that is left to the optimizer's kernel.

    Attributes:
        norm: Norm of the unscaled gradients, after ``earlier``; float32, 0-dim.
        max_norm: Largest norm.
        earlier: Factor of the clips before, float32, 0-dim; None if there were none.
    """

    norm: Tensor
    max_norm: float
    earlier: Tensor | None = None

    def factor(self) -> Tensor:
        """Return what clipping multiplies the unscaled gradients by."""
        factor: Tensor = torch.ops.amp_plugin.clip_factor(self.norm, self.max_norm)
        return factor if self.earlier is None else factor * self.earlier

    def divisor(self, scale: Tensor) -> Tensor:
        """Return what unscaling and clipping divides the scaled gradients by; one launch."""
        scale = scale.to(self.norm.device, non_blocking=True)
        divisor: Tensor = torch.ops.amp_plugin.clip_factor(self.norm, self.max_norm, scale)
        return divisor if self.earlier is None else divisor / self.earlier


def foldable(record: OptimizerRecord) -> LossScale | None:
    """Return the one loss scale all gradients carry, if the optimizer's kernel may divide by it.

    Not if another optimizer steps some of the parameters too: it would not know whether they
    have been unscaled. Not if a hook runs before the step: it may look at the gradients.
    """
    if record.shared or not getattr(record.optimizer, "_step_supports_amp_scaling", False):
        return None
    if getattr(record.optimizer, "_optimizer_step_pre_hooks", None) or _global_optimizer_pre_hooks:
        return None
    unit = record.sets[0].unit if record.sets else None
    return unit if all(one.unit is unit for one in record.sets) else None


def step(
    scaler: OptimizerCalls, record: OptimizerRecord, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer with AMP support; no host sync."""
    if record.takes_scaler is None:
        record.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
    if record.takes_scaler:
        return _hand_over_scaler(scaler, record, optimizer, args, kwargs)
    for one in record.sets:
        stepping.assume(scaler, record, one)
    unit = foldable(record)
    _refuse_changed_after_clip(record)
    norm, found = stepping.check(scaler, record, write=unit is None)
    if not record.momentum_started:
        record.momentum_started = not _starts_momentum(optimizer)
        if not record.momentum_started and found.item() > 0:
            _leave_scaled(record, unit, found)
            stepping.finish(scaler, record, norm, found, known=True)
            return None
    given: Tensor | None = getattr(optimizer, "grad_scale", None)
    factor = given if unit is None else _factor(unit, record.clip, given)
    optimizer.grad_scale, optimizer.found_inf = factor, found  # type: ignore[attr-defined]
    try:
        value = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    _leave_scaled(record, unit, found)
    stepping.finish(scaler, record, norm, found, known=None)
    return value


def _leave_scaled(record: OptimizerRecord, unit: LossScale | None, found: Tensor) -> None:
    """Note what the gradients carry after a folded step: nothing if it was taken, the scale if not."""
    if unit is not None:
        scaled = unit.snapshot()
        for one in record.sets:
            one.unit, one.residue = None, Residue(scaled, found)


def _factor(unit: LossScale, clip: FoldedClip | None, given: Tensor | None) -> Tensor:
    """What the kernel divides by: scale, clipping, and what the user has set."""
    factor = unit.require() if clip is None else clip.divisor(unit.require())
    return factor if given is None else factor * given


def write_clip(record: OptimizerRecord) -> None:
    """Write a folded clip into the gradients after all, since more will be added to them."""
    clip, record.clip = record.clip, None
    if clip is not None:
        factor = clip.factor()
        for one in record.sets:
            one.multiply_(factor)


def _refuse_changed_after_clip(record: OptimizerRecord) -> None:
    if record.clip is not None and any(one.parts and one.changed_since_measured() for one in record.sets):
        msg = (
            "gradients were changed between clip_grad_norm_(..., fold=True) and step(): they were still "
            "scaled then. Call it with fold=False, or change them before."
        )
        raise RuntimeError(msg)


def _starts_momentum(optimizer: Optimizer) -> bool:
    """Whether SGD's kernel would leave uninitialised momentum buffers behind if it skips.

    torch allocates them with ``empty_like`` at the first step and returns before writing.
    """
    if not isinstance(optimizer, SGD):
        return False
    return any(
        group["momentum"] and p.grad is not None and optimizer.state[p].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _hand_over_scaler(
    scaler: OptimizerCalls, record: OptimizerRecord, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """The older contract: ``step(grad_scaler=...)`` does everything itself."""
    warnings.warn(
        f"{type(optimizer).__name__}.step takes grad_scaler, which is deprecated; let it read "
        "self.grad_scale and self.found_inf instead.",
        FutureWarning,
        stacklevel=4,
    )
    norm, found = stepping.check(scaler, record, write=False)
    value = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    stepping.finish(scaler, record, norm, found, known=None)
    return value
