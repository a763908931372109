"""When the scale may change: update() is a request until no gradient depends on the old one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from amp_plugin.scaling.loss_scale import LossScale, LossScales
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.step_log import StepLog
from amp_plugin.user_warnings import warn_user

_NO_STEP = (
    "update(): a scaled loss ran backward(), but this scaler knows no optimizer. Call scaler.step(optimizer) "
    "instead of optimizer.step(), which takes the scaled gradients as they are; if the first step is still "
    "to come, call scaler.register(optimizer) before."
)

_AT_FLOOR = (
    "gradients overflowed although the loss scale is at min_scale: lowering it further does not help. Look "
    "at last_step(optimizer).overflow_report(), lower min_scale, or use bfloat16."
)


class Updates:
    """The requested update of the loss scales."""

    def __init__(self, scales: LossScales, registry: Registry, log: StepLog) -> None:
        self._scales = scales
        self._registry = registry
        self._log = log
        self._requested = False
        self._told_of_floor = False

    def request(self) -> None:
        """Ask for an update; applied at once if no gradient waits."""
        self._begin()
        if not self._log.has_steps and self._registry.last_backward is not None and not self._registry:
            warn_user(_NO_STEP)
        self._requested = True
        self.settle(force=False)

    def set_scale(self, new_scale: float | Tensor) -> None:
        """Set all loss scales at once; pending gradients are converted."""
        value = _checked(new_scale)
        self.refuse_half(f"update({new_scale!r})")
        self._begin()
        before = [(loss_scale, loss_scale.snapshot()) for loss_scale in self._scales.materialized()]
        for loss_scale, _ in before:
            loss_scale.found_inf = None
            loss_scale.fill_(value)
        self.begin_anew(before)

    def _begin(self) -> None:
        self._log.read()
        self._scales.updates_requested += 1
        self._log.note_update()

    def begin_anew(self, before: Iterable[tuple[LossScale, Tensor]]) -> None:
        """Go on from loss scales set by hand: no update is requested, pending gradients are converted."""
        self._requested = False
        for loss_scale, old in before:
            self._convert(loss_scale, old)
            loss_scale.publish()

    def settle(self, *, force: bool) -> None:
        """Apply a requested update, unless gradients wait that depend on the scale."""
        if not self._requested or (not force and self._registry.delays_update()):
            return
        joined = self._registry.refresh_joined()
        if self._half_gradients_wait() if force else joined and self._registry.delays_update():
            return
        self._requested = False
        for loss_scale in self._scales.materialized():
            if loss_scale.found_inf is not None:
                old = loss_scale.snapshot()
                at_floor = loss_scale.update_()
                if at_floor is not None:
                    self._log.when_known(at_floor, self._tell_of_floor)
                self._convert(loss_scale, old)
            loss_scale.publish()
        self._log.read()

    def _half_gradients_wait(self) -> bool:
        return any(
            gradients.is_pending(state.number) and gradients.first_half() is not None
            for state in self._registry
            for gradients in state.groups
        )

    def refuse_half(self, call: str) -> None:
        """Raise if float16 gradients wait that a new scale would have to be written into."""
        for state in self._registry:
            for gradients in state.groups:
                param = None if gradients.scaled_by is None else gradients.first_half()
                if param is not None:
                    name = state.name_of(param)
                    msg = (
                        f"{call} would convert the float16 gradient of parameter {name!r} "
                        "to another scale, which loses small ones: call it after step(), or clear the "
                        "gradients with zero_grad()."
                    )
                    raise RuntimeError(msg)

    def _convert(self, loss_scale: LossScale, old: Tensor) -> None:
        """Multiply the gradients that carry the old scale by new/old."""
        carriers = [
            gradients
            for gradients in self._registry.groups()
            if gradients.scaled_by is loss_scale and gradients.has_gradients()
        ]
        if carriers:
            factor = loss_scale.require() / old
            for gradients in carriers:
                gradients.multiply_(factor)

    def _tell_of_floor(self, overflowed: bool) -> None:
        """Raise, or warn once, of an overflow at the floor."""
        if overflowed and self._scales.default.options.on_min_scale == "raise":
            raise FloatingPointError(_AT_FLOOR)
        if overflowed and not self._told_of_floor:
            self._told_of_floor = True
            warn_user(f"{_AT_FLOOR} Such steps are skipped, and on_min_scale='raise' ends the run.")


def _checked(new_scale: float | Tensor) -> float | Tensor:
    if isinstance(new_scale, Tensor):
        if new_scale.numel() != 1 or not new_scale.is_floating_point():
            msg = (
                f"new_scale must be a number or a floating tensor of one element, got "
                f"{tuple(new_scale.shape)} of {new_scale.dtype}"
            )
            raise ValueError(msg)
        return new_scale
    msg = f"new_scale={new_scale!r} is not allowed; give a finite number greater than 0"
    try:
        value = float(new_scale)
    except (TypeError, ValueError) as error:
        raise ValueError(msg) from error
    if not 0 < value < float("inf"):
        raise ValueError(msg)
    return value
