"""When the scale may change: update() is a request until no gradient depends on the old one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.step_result import HostFlag

if TYPE_CHECKING:
    from amp_plugin.scaling.gradient_set import GradientSet
    from amp_plugin.scaling.optimizer_calls import OptimizerCalls

_NO_STEP = (
    "update(): a scaled loss ran backward(), but this scaler knows no optimizer. Call scaler.step(optimizer) "
    "instead of optimizer.step(), which takes the scaled gradients as they are; if the first step is still "
    "to come, call scaler.register(optimizer) before."
)


def request(scaler: OptimizerCalls, new_scale: float | Tensor | None) -> None:
    """Ask for an update, or set the scale at once."""
    _raise_at_floor(scaler)
    for record in scaler._registry:
        record.stage = OptState.READY
        record.unanswered = 0
    if new_scale is None:
        if scaler._last_backward is not None and not scaler._registry and scaler._skipped is None:
            warnings.warn(_NO_STEP, UserWarning, stacklevel=3)
        scaler._requested = True
        settle(scaler, force=False)
        return
    value = _checked(new_scale)
    refuse_fp16(scaler, f"update({new_scale!r})")
    scaler._requested = False
    for loss_scale in scaler._all_loss_scales():
        if loss_scale.value is not None:
            loss_scale.found_inf = None
            old = loss_scale.snapshot()
            loss_scale.fill_(value)
            convert(scaler, loss_scale, old)


def settle(scaler: OptimizerCalls, *, force: bool) -> None:
    """Apply a requested update, unless gradients wait that depend on the scale.

    Args:
        scaler: The scaler.
        force: Apply it all the same and convert those gradients; only float16 ones prevent it.
    """
    if not scaler._requested:
        return
    waiting = [one for record in scaler._registry for one in record.sets if one.pending(record.slot)]
    if waiting and (not force or any(one.first_of_dtype(torch.float16) is not None for one in waiting)):
        return
    scaler._requested = False
    for loss_scale in scaler._all_loss_scales():
        if loss_scale.value is not None and loss_scale.found_inf is not None:
            old = loss_scale.snapshot()
            at_floor = loss_scale.update_()
            if at_floor is not None:
                scaler._floor.append(HostFlag(at_floor))
            convert(scaler, loss_scale, old)
    for result, loss_scale in list(scaler._open_results.items()):
        result.close(loss_scale.snapshot())
    scaler._open_results.clear()
    _raise_at_floor(scaler)


def refuse_fp16(scaler: OptimizerCalls, call: str) -> None:
    """Raise if float16 gradients wait that a new scale would have to be written into."""
    for record in scaler._registry:
        for one in record.sets:
            position = one.first_of_dtype(torch.float16) if one.unit is not None else None
            if position is not None:
                name = record.name_of(one.params[position])
                msg = (
                    f"{call} would convert the float16 gradient of parameter {name!r} to another scale, "
                    "which loses small ones: call it after step(), or clear the gradients with zero_grad()."
                )
                raise RuntimeError(msg)


def convert(scaler: OptimizerCalls, loss_scale: LossScale, old: Tensor) -> None:
    """Multiply the gradients that carry the old scale by new/old."""
    carriers: list[GradientSet] = [
        one for one in scaler._registry.sets() if one.unit is loss_scale and one.ledger.count()
    ]
    if carriers:
        factor = loss_scale.require() / old
        for one in carriers:
            one.multiply_(factor)


def _checked(new_scale: float | Tensor) -> float | Tensor:
    if isinstance(new_scale, Tensor):
        if new_scale.numel() != 1 or not new_scale.is_floating_point():
            msg = (
                f"new_scale must be a number or a floating tensor of one element, got "
                f"{tuple(new_scale.shape)} of {new_scale.dtype}"
            )
            raise ValueError(msg)
        return new_scale
    value = float(new_scale)
    if not 0 < value < float("inf"):
        msg = f"new_scale={new_scale!r} is not allowed; give a finite number greater than 0"
        raise ValueError(msg)
    return value


def _raise_at_floor(scaler: OptimizerCalls) -> None:
    """Raise if the host knows by now of an overflow at the floor."""
    for flag in list(scaler._floor):
        known = flag.known()
        if known is not None:
            scaler._floor.remove(flag)
        if known:
            msg = (
                "gradients overflowed although the loss scale is at min_scale: lowering it further does "
                "not help. Look at last_step(optimizer).overflow_report(), lower min_scale, or use bfloat16."
            )
            raise FloatingPointError(msg)
