"""Check gradients and step: what step(), unscale_() and the clippers share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling import folding, sync_free
from amp_plugin.scaling.distributed import Part, agree_on_core, combine
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.loss_scale import DynamicLossScale, LossScale
from amp_plugin.scaling.registry import OptimizerRecord
from amp_plugin.scaling.step_result import StepResult

if TYPE_CHECKING:
    from amp_plugin.scaling.optimizer_calls import OptimizerCalls

# A critic may step a hundred times before a generator's step; torch.amp refuses the second step.
_STEPS_WITHOUT_UPDATE = 200


def check(
    scaler: OptimizerCalls, record: OptimizerRecord, *, write: bool, norm_type: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Measure an optimizer's gradients, over all ranks; note an overflow for the next update.

    Args:
        scaler: The scaler.
        record: The optimizer.
        write: Whether to unscale them in place too.
        norm_type: The p of the norm.

    Returns:
        Norm of the unscaled gradients and found_inf, float32, 0-dim, on the loss scale's device.
    """
    parts: list[Part] = []
    grown = [one.grown() for one in record.sets]
    if any(grown):
        record.norm = None  # it was that of fewer micro-batches
    for one in record.sets:
        assume(scaler, record, one)
        if one.unit is not None:
            if write:
                _refuse_fp16(scaler, record, one)
            if one.unit not in record.losses:
                record.losses.append(one.unit)
        parts += one.unscale_(norm_type) if write else one.measure(norm_type)
    device = _device(scaler)
    _agree(scaler, device)
    earlier = [one.overflow for one in record.sets if one.overflow is not None]
    norm, found = combine(parts, norm_type, device, scaler._groups, record.spreads, earlier)
    if record.norm is None and parts:
        record.norm = norm
    record.found_inf_per_device = {device: found} if parts else {}
    if parts or scaler._groups or record.spreads:
        for loss_scale in record.losses:
            loss_scale.record(found)
    if write and record.clip is not None:
        norm = norm * record.clip.factor()
        folding.write_clip(record)
    return norm, found


def _device(scaler: OptimizerCalls) -> torch.device:
    return scaler._check_scale_growth_tracker("step")[0].device


def _agree(scaler: OptimizerCalls, device: torch.device) -> None:
    if not scaler._core_agreed:
        agree_on_core(scaler._groups, device)
        scaler._core_agreed = True


def assume(scaler: OptimizerCalls, record: OptimizerRecord, one: GradientSet) -> None:
    """Follow torch where no scaled backward was seen: after update(), new gradients are scaled ones.

    So it is under torch.compile, or when a loss was multiplied by get_scale() by hand.
    """
    unseen = one.unit is None and record.slot not in one.touched and record.stage is OptState.READY
    if unseen and one.renewed(record.slot):
        one.unit, one.residue = scaler._loss_scale, None


def _refuse_fp16(scaler: OptimizerCalls, record: OptimizerRecord, one: GradientSet) -> None:
    if scaler._fp16_gradients:
        return
    position = one.first_of_dtype(torch.float16)
    if position is not None:
        name = record.name_of(one.params[position])
        msg = (
            f"Attempting to unscale FP16 gradients. Parameter {name!r} is float16: keep "
            "parameters in float32 and let autocast cast them (model.float()), or pass fp16_gradients=True "
            "and lose gradients below 6e-8."
        )
        raise ValueError(msg)


def catch_up(record: OptimizerRecord, loss_scale: LossScale, generation: int, snapshot: Tensor) -> None:
    """Convert the gradients of an optimizer that was not known at the last backward."""
    for one in record.sets:
        if len(one.owners) == 1:
            one.unit = loss_scale
            one.touched = set(one.owners)
            if loss_scale.generation != generation and one.ledger.count():
                one.multiply_(loss_scale.require() / snapshot)


def step(
    scaler: OptimizerCalls, record: OptimizerRecord, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Step one optimizer, or skip; the ways differ in who finds out about the overflow."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return folding.step(scaler, record, optimizer, args, kwargs)
    norm, found = check(scaler, record, write=True)
    if scaler._sync_free and sync_free.possible(optimizer, found.device):
        value = sync_free.step(optimizer, found, args, kwargs)
        finish(scaler, record, norm, found, known=None)
        return value
    skipped = bool(found.item() > 0)
    value = None if skipped else optimizer.step(*args, **kwargs)
    finish(scaler, record, norm, found, known=skipped)
    return value


def finish(
    scaler: OptimizerCalls, record: OptimizerRecord, norm: Tensor, found: Tensor, *, known: bool | None
) -> None:
    """Close an optimizer's window: its result, its counters, its marks."""
    scales = record.losses or [scaler._loss_scale]
    measured = bool(record.found_inf_per_device)
    record.result = StepResult(
        norm=(record.norm if record.norm is not None else norm) if measured else None,
        found_inf=found,
        scale_before=scales[0].snapshot() if scales[0].value is not None else None,
        flags=_named_flags(record),
        known=known,
    )
    scaler._open_results[record.result] = scales[0]
    record.skipped = _counted(found, record.skipped)
    scaler._skipped = _counted(found, scaler._skipped)
    record.stage = OptState.STEPPED
    record.unanswered += 1
    if record.unanswered == _STEPS_WITHOUT_UPDATE and isinstance(scales[0], DynamicLossScale):
        warnings.warn(_no_update_text(record), UserWarning, stacklevel=2)
    for one in record.sets:
        one.stepped(record.slot)
    record.forget_window()


def _no_update_text(record: OptimizerRecord) -> str:
    return (
        f"{record.unanswered} steps of {type(record.optimizer).__name__} without scaler.update(): the loss "
        "scale stays where it is, and if it is too high every step is skipped. Call update() once per "
        "iteration, or make the scaler with dynamic=False."
    )


def _counted(found: Tensor, count: Tensor | None) -> Tensor:
    """Add to a count in place: a captured step adds to the same tensor at each replay."""
    return found.clone() if count is None else count.add_(found)


class _named_flags:  # noqa: N801 -- a function with storage
    """The overflow flags of one step, with the names they belong to, looked up when asked."""

    def __init__(self, record: OptimizerRecord) -> None:
        self._record = record
        self._params = record.params
        self._parts = [(one.params, part) for one in record.sets for part in one.flagged()]

    def __call__(self) -> Iterator[tuple[str, int]]:
        names = self._record.all_names(self._params)
        index = {id(param): i for i, param in enumerate(self._params)}
        found: dict[int, int] = {}
        for params, part in self._parts:
            positions = range(len(params)) if part.positions is None else part.positions
            for position, flag in zip(positions, part.flags.tolist(), strict=True):
                if flag:
                    place = index[id(params[position])]
                    found[place] = found.get(place, 0) | flag
        return iter((names[place], found[place]) for place in sorted(found))
