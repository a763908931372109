"""When the scale may change: update() is a request until no gradient depends on the old one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.loss_scales import LossScales
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.skipped_steps import SkippedSteps
from amp_plugin.scaling.step_result import HostFlag, StepResult
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


# A critic may step a hundred times before a generator's step; torch.amp refuses the second step.
_STEPS_WITHOUT_UPDATE = 200


class Updates:
    """The requested update of the loss scales, and the steps since the last one.

    Args:
        scales: The loss scales.
        registry: Whose gradients may have to wait, or to be converted.

    Attributes:
        skipped: How many steps were skipped, of all optimizers.
    """

    def __init__(self, scales: LossScales, registry: Registry) -> None:
        self._scales = scales
        self._registry = registry
        self._requested = False
        self._at_floor: list[HostFlag] = []
        self._told_of_floor = False
        self._steps_since_update: dict[int, int] = {}  # of each window, by its number
        self.skipped = SkippedSteps()

    def note_step(self, window: OptimizerWindow, result: StepResult) -> None:
        """Count a step that was taken or skipped; warn once if no update ever follows."""
        self.skipped.add(result.found_inf)
        steps = self._steps_since_update[window.number] = self._steps_since_update.get(window.number, 0) + 1
        if steps == _STEPS_WITHOUT_UPDATE and window.result_scale.options.dynamic:
            warn_user(
                f"{steps} steps of {type(window.optimizer).__name__} without scaler.update(): the loss "
                "scale stays where it is, and if it is too high every step is skipped. Call update() once "
                "per iteration, or make the scaler with dynamic=False."
            )

    def _count_update(self) -> None:
        self._scales.updates_requested += 1
        self._steps_since_update.clear()

    def request(self) -> None:
        """Ask for an update; applied at once if no gradient waits.

        Raises:
            FloatingPointError: An overflow at the floor is known of, with ``on_min_scale="raise"``.
        """
        self._tell_of_floor()
        self._count_update()
        if self.skipped.count is None and self._registry.last_backward is not None and not self._registry:
            warn_user(_NO_STEP)
        self._requested = True
        self.settle(force=False)

    def set_scale(self, new_scale: float | Tensor) -> None:
        """Set all loss scales at once; pending gradients are converted.

        Raises:
            RuntimeError: A pending gradient is float16.
            ValueError: ``new_scale`` is no scale.
        """
        value = _checked(new_scale)
        self.refuse_half(f"update({new_scale!r})")
        self._tell_of_floor()
        self._count_update()
        self._requested = False
        for loss_scale in self._scales.materialized():
            loss_scale.found_inf = None
            old = loss_scale.snapshot()
            loss_scale.fill_(value)
            self.convert(loss_scale, old)
            loss_scale.tell()

    def begin_anew(self, before: Iterable[tuple[LossScale, Tensor]]) -> None:
        """Go on from loaded loss scales: no update is requested, pending gradients are converted.

        Args:
            before: The scales with their values before loading.
        """
        self._requested = False
        self.skipped = SkippedSteps()
        self._at_floor.clear()
        for loss_scale, old in before:
            self.convert(loss_scale, old)
            loss_scale.tell()

    def settle(self, *, force: bool) -> None:
        """Apply a requested update, unless gradients wait that depend on the scale.

        Args:
            force: Apply it all the same and convert those gradients; only float16 ones prevent it.
        """
        if not self._requested:
            return
        if not force and self._registry.delays_update():
            return
        joined = self._registry.refresh_joined()
        if (joined and not force and self._registry.delays_update()) or (
            force and self._half_gradients_wait()
        ):
            return
        self._requested = False
        for loss_scale in self._scales.materialized():
            if loss_scale.found_inf is not None:
                old = loss_scale.snapshot()
                at_floor = loss_scale.update_()
                if at_floor is not None:
                    self._at_floor.append(HostFlag(at_floor))
                self.convert(loss_scale, old)
            loss_scale.tell()
        self._tell_of_floor()

    def _half_gradients_wait(self) -> bool:
        return any(
            gradients.is_pending(window.number) and gradients.first_half() is not None
            for window in self._registry
            for gradients in window.sets
        )

    def refuse_half(self, call: str) -> None:
        """Raise if float16 gradients wait that a new scale would have to be written into.

        Args:
            call: The call that asks, for the error.
        """
        for window in self._registry:
            for gradients in window.sets:
                param = None if gradients.scaled_by is None else gradients.first_half()
                if param is not None:
                    name = window.name_of(param)
                    msg = (
                        f"{call} would convert the float16 gradient of parameter {name!r} "
                        "to another scale, which loses small ones: call it after step(), or clear the "
                        "gradients with zero_grad()."
                    )
                    raise RuntimeError(msg)

    def convert(self, loss_scale: LossScale, old: Tensor) -> None:
        """Multiply the gradients that carry the old scale by new/old."""
        carriers = [
            gradients
            for gradients in self._registry.sets()
            if gradients.scaled_by is loss_scale and gradients.has_gradients()
        ]
        if carriers:
            factor = loss_scale.require() / old
            for gradients in carriers:
                gradients.rescale_(factor)

    def _tell_of_floor(self) -> None:
        """Raise, or warn once, if the host knows by now of an overflow at the floor."""
        for flag in list(self._at_floor):
            known = flag.known()
            if known is not None:
                self._at_floor.remove(flag)
            if known and self._scales.default.options.on_min_scale == "raise":
                raise FloatingPointError(_AT_FLOOR)
            if known and not self._told_of_floor:
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
