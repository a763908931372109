"""All that is known of one optimizer between its steps."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.mistakes import MISTAKES
from amp_plugin.scaling.gradients import Measurement, ShardLayout
from amp_plugin.scaling.loss_scale import LossScale, LossScales, capturing, moved
from amp_plugin.scaling.overflows import ParameterNames, report_of
from amp_plugin.scaling.ranks import Ranks
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.scaling.unscaling import GradientGroup

_PAST_THE_SCALER = MISTAKES["AMP002"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all optimizers of a scaler use."""

    scales: LossScales
    ranks: Ranks
    fp16_gradients: bool = False  # whether they may be unscaled
    one_pass: bool = True  # whether steps may be taken in one pass
    checks: bool = True  # whether gradients are looked at where nothing is scaled


class MeasuredClip(NamedTuple):
    """A clip by norm, with the norm: written at once, or left to the step, whose kernel divides by it too."""

    norm: Tensor  # of the unscaled gradients, float32, 0-dim, as the next
    found_inf: Tensor
    max_norm: float
    norm_type: float

    def factor(self, scale: Tensor | None = None) -> Tensor:
        """Return what clipping multiplies gradients by; with their scale, what divides scaled ones; 0-dim."""
        on = self.norm.device
        scale = None if scale is None else moved(scale, on)
        return torch.ops.amp_plugin.clip_factor(  # type: ignore[no-any-return]
            self.norm, self.max_norm, scale, moved(self.found_inf, on)
        )


class PerOptimizerState:
    """An optimizer's gradients from one step to the next: measured, unscaled, clipped, used."""

    def __init__(self, optimizer: weakref.ref[Optimizer], number: int, shared: Shared) -> None:
        self._optimizer, self._shared = optimizer, shared
        self.number = number  # among the scaler's optimizers, from 1 on
        self.is_scaled = shared.scales.enabled
        self.names = ParameterNames()
        self.params: list[Tensor] = []
        self.groups: list[GradientGroup] = []
        self.layouts: tuple[ShardLayout, ...] = ()
        self.spans_ranks = bool(shared.ranks.groups)
        self.has_momentum = False  # whether all momentum buffers of a fused SGD are known to exist
        self.changes_early: bool | None = None  # weights, before the last closure call; None if not seen
        self.backwards = 0  # scaled ones that have begun since it was met
        self.obstacle = ""  # why the last step was not taken in one pass
        self.result: StepResult | None = None
        self.scaled_clip = ScaledClip()
        self.is_stepping = False  # through the scaler
        self.is_unchanged = False  # promised: no user code has touched the gradients since the last call
        self._stage = (OptState.READY, 0)
        self._trusted = False
        self._open()

    def _open(self) -> None:
        """Forget what was measured and clipped for the step before."""
        self.norm: Tensor | None = None  # before clipping; None if it was not taken
        self.norm_type = 2.0
        self.loss_scales: list[LossScale] = []
        self.folded_clip: MeasuredClip | None = None  # left to the step
        self.has_written_clip = False  # by norm, since the last backward
        self.found_inf_per_device: dict[Any, Tensor] = {}
        self._measured: list[tuple[list[Tensor], Measurement]] = []

    @property
    def optimizer(self) -> Any:
        """The optimizer, which exists as long as the registry holds its state."""
        return self._optimizer()

    def take_params(self, params: list[Tensor], layouts: tuple[ShardLayout, ...]) -> None:
        """Record that the optimizer has these parameters now."""
        self.params, self.layouts = params, layouts
        self.spans_ranks = bool(self._shared.ranks.groups or layouts)
        self.has_momentum = False

    def has_exactly(self, params: list[Tensor]) -> bool:
        """Whether the optimizer steps these parameters and no others."""
        return {*map(id, params)} == {*map(id, self.params)}

    @property
    def is_shared(self) -> bool:
        """Whether another optimizer steps some of the parameters too."""
        return any(len(gradients.owners) > 1 for gradients in self.groups)

    @property
    def stage(self) -> OptState:
        """What torch's scaler would say: READY, UNSCALED or STEPPED; an update makes it READY."""
        stage, updates = self._stage
        return stage if updates == self._shared.scales.updates_requested else OptState.READY

    @stage.setter
    def stage(self, stage: OptState) -> None:
        self._stage = (stage, self._shared.scales.updates_requested)

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(gradients.has_gradients() for gradients in self.groups)

    def device(self) -> torch.device:
        """Return where norm and found_inf of its gradients belong."""
        on = self._shared.scales.device
        if on is None:
            on = next((param.device for param in self.params if param.grad is not None), None)
        return on or (self.params[0].device if self.params else torch.device("cpu"))

    def scales_carried(self) -> set[LossScale | None]:
        """Return the loss scales that its gradients are multiplied by; None stands for none."""
        return {gradients.scaled_by for gradients in self.groups}

    def delays_update(self) -> bool:
        """Whether the loss scale must not change before its step; the same on all ranks."""
        return self.is_awaited() if self.spans_ranks else self.is_pending()

    def is_awaited(self) -> bool:
        """Whether it has neither stepped nor unscaled since a scaled backward began."""
        return any(self.number in gradients.awaited_owners for gradients in self.groups)

    def is_pending(self) -> bool:
        """Whether scaled gradients wait for the next step."""
        return any(gradients.is_pending(self.number) for gradients in self.groups)

    def parameter_names(self) -> list[str]:
        """Return the name of each parameter."""
        return self.names.of(self.params, self._optimizer())

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return self.parameter_names()[next(i for i, own in enumerate(self.params) if own is param)]

    def __getitem__(self, key: str) -> Any:
        """Read as torch's per-optimizer dict: ``"stage"`` or ``"found_inf_per_device"``."""
        if key == "found_inf_per_device" and self.stage is OptState.STEPPED and self.result is not None:
            return {self.result.found_inf.device: self.result.found_inf}
        if key in {"stage", "found_inf_per_device"}:
            return getattr(self, key)
        raise KeyError(key)

    def begin_call(self) -> None:
        """Read gradients again in this call of the scaler, since user code may have written to them."""
        self._trusted, self.is_unchanged = self.is_unchanged, False
        if not self._trusted:
            for gradients in self.groups:
                gradients.invalidate_measurement()
        scales = self._shared.scales
        if scales.default.value is None:
            return
        # A compiled backward, a replayed graph and a loss times get_scale() bring scaled gradients unseen.
        for gradients in self.groups:
            gradients.count_as_scaled(self.number, scales.updates_requested, scales.default)

    def begin_clip(self) -> None:
        """As :meth:`begin_call`; of several clips before a step, the norm before the first is kept."""
        self.begin_call()
        is_new = self.folded_clip is not None and any(gradients.is_new() for gradients in self.groups)
        if is_new or not self.has_gradients():
            self.folded_clip = None  # what it was to clip was dropped
        if not self.is_scaled and any(gradients.is_changed() for gradients in self.groups):
            self.norm = None  # there are other gradients; with a loss scale their backward tells

    def take_norm(self, norm: Tensor, norm_type: float) -> None:
        """Keep the norm of the gradients, unless one from before a clip is kept."""
        if self.norm is None:
            self.norm, self.norm_type = norm, norm_type

    def note_written(self) -> None:
        """Record that a clip has written the gradients: they are still those that were measured."""
        for gradients in self.groups:
            gradients.note_written()

    def measure(self, *, unscale: bool, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """Measure the gradients, over all ranks, unscaled in place or not; record an overflow."""
        if unscale:
            self.write_clip()
        for gradients in self.groups:
            if gradients.grew():
                self.norm = None  # it was that of fewer micro-batches
        measured, norm, found = self._measure(unscale=unscale, norm_type=norm_type)
        if measured:
            self.take_norm(norm, norm_type)
        self.found_inf_per_device = {found.device: found} if measured else {}
        self._measured = [
            (gradients.params, measurement)
            for gradients in self.groups
            for measurement in gradients.all_measurements(self.number)
        ]
        if measured or self.spans_ranks:
            for loss_scale in self.loss_scales:
                loss_scale.record(found)
        for gradients in self.groups:
            for loss_scale, overflow in gradients.take_contributions():
                loss_scale.record(found if self.spans_ranks else overflow)
        return norm, found

    def _measure(self, *, unscale: bool, norm_type: float) -> tuple[bool, Tensor, Tensor]:
        """As :meth:`measure`, but nothing is recorded; also returns whether there was a gradient."""
        measurements, earlier = list[Measurement](), list[Tensor]()
        for gradients in self.groups:
            loss_scale = gradients.scaled_by
            if loss_scale is not None:
                if unscale:
                    self._refuse_half(gradients)
                if loss_scale not in self.loss_scales:
                    self.loss_scales.append(loss_scale)
            measurements += gradients.unscale_(norm_type) if unscale else gradients.measure(norm_type)
            overflow = gradients.found_before(self.number).found_inf
            if overflow is not None:
                earlier.append(overflow)
        if self.is_scaled and self.stage is OptState.UNSCALED:  # a program may have written to it
            earlier = [*{id(flag): flag for flag in (*earlier, *self.found_inf_per_device.values())}.values()]
        device = self.device()
        if len(measurements) == 1 and not self.spans_ranks:
            flags = (moved(flag, device) for flag in (measurements[0].found_inf, *earlier))
            return True, moved(measurements[0].norm, device), reduce(torch.maximum, flags)
        ranks = self._shared.ranks
        return bool(measurements), *ranks.combine(measurements, norm_type, device, self.layouts, earlier)

    def _refuse_half(self, gradients: GradientGroup) -> None:
        param = None if self._shared.fp16_gradients else gradients.first_float16()
        if param is not None:
            msg = (
                f"Attempting to unscale FP16 gradients. Parameter {self.name_of(param)!r} is float16: keep "
                "parameters in float32 and let autocast cast them (model.float()), or pass "
                "fp16_gradients=True and lose gradients below 6e-8."
            )
            raise ValueError(msg)

    def unscale_(self, norm_type: float = 2.0, *, on_request: bool = False) -> tuple[Tensor, Tensor]:
        """Unscale the gradients if they are not; returns norm and found_inf as :meth:`measure`."""
        if on_request:
            self.begin_call()
        measured = self.measure(unscale=True, norm_type=norm_type)
        self.stage = OptState.UNSCALED
        for gradients in self.groups:
            gradients.updates_at_last_use = self._shared.scales.updates_requested
            if on_request:
                gradients.note_unscaled(self.number)
        return measured

    def note_backward(self) -> None:
        """Record that a scaled backward begins, once the gradients are in its unit."""
        self.backwards += 1
        self.has_written_clip, self.found_inf_per_device = False, {}
        if self.norm is not None:
            for gradients in self.groups:
                gradients.mark_backward()

    def step_by(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call the step of the optimizer, or of one that wraps it."""
        self.is_stepping = True
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.is_stepping = False

    def refuse_step_past_scaler(self) -> None:
        """Raise if the optimizer steps by itself with gradients that are multiplied by the scale."""
        scaled = any(
            gradients.scaled_by is not None
            and self.number in gradients.awaited_owners
            and gradients.is_pending(self.number)
            for gradients in self.groups
        )
        if scaled and not self.is_stepping:
            kind = type(self.optimizer).__name__
            msg = (
                f"{kind}.{_PAST_THE_SCALER.what}: {_PAST_THE_SCALER.instead}, or scaler.unscale_(optimizer) "
                "before; in Accelerate, Fabric and Lightning step the optimizer that prepare(), setup() or "
                "optimizers() returned."
            )
            raise RuntimeError(msg)

    def refuse_taken_away(self) -> None:
        """Raise if hooks took the gradients of a scaled backward away, still multiplied by the scale."""
        taken_away = [param for gradients in self.groups for param in gradients.taken_away]
        if taken_away and not self.has_gradients():
            kind = type(self.optimizer).__name__
            msg = (
                f"{kind}: a hook took the gradient of {self.name_of(taken_away[0])!r} away during "
                "backward(), multiplied by the loss scale, so that it can neither be unscaled nor "
                "checked. Such an optimizer needs a run without a loss scale: use bfloat16, or "
                "GradScaler(enabled=False)."
            )
            raise RuntimeError(msg)

    def clip_suspect(self) -> LossScale | None:
        """Return the scale that torch's clip may have left on the gradients, in the first steps only."""
        scales = self.scales_carried()
        are_scaled = len(scales) == 1 and None not in scales
        looks = self.scaled_clip.steps_left and self.folded_clip is None and are_scaled
        return scales.pop() if looks and _are_written_over(self.params) else None

    def refuse_scaled_clip(self, is_one: bool) -> None:
        """Raise if gradients were clipped while they were multiplied by the scale."""
        if is_one:
            msg = (
                f"{type(self.optimizer).__name__}: scaled gradients came to {ScaledClip.IN_A_ROW} steps in a "
                f"row with one norm, {self.scaled_clip.norm:.2g}: clip_grad_norm_ of torch has clipped them "
                "before they were unscaled, which divides each step by the loss scale. Call "
                "scaler.unscale_(optimizer) before it, or scaler.clip_grad_norm_(optimizer, max_norm) in its "
                "place; in Accelerate accelerator.clip_grad_norm_(), in Fabric fabric.clip_gradients(), in "
                "Lightning self.clip_gradients() or Trainer(gradient_clip_val=...)."
            )
            raise RuntimeError(msg)

    def remeasure_clip(self, measured: tuple[Tensor, Tensor] | None = None) -> MeasuredClip | None:
        """Return the folded clip, of what the gradients are at the step: their norm and found_inf."""
        if self.folded_clip is not None and not self._trusted:
            norm, found = measured or self._measure(unscale=False, norm_type=self.folded_clip.norm_type)[1:]
            self.folded_clip = self.folded_clip._replace(norm=norm, found_inf=found)
        return self.folded_clip

    def refuse_changed_after_clip(self) -> None:
        """Raise if gradients were seen to change since a clip was folded."""
        if self.folded_clip is not None and any(gradients.is_changed() for gradients in self.groups):
            msg = (
                "gradients were changed between clip_grad_norm_(..., fold=True) and step(): they were still "
                "scaled and not clipped then. Call it with fold=False, or change them before."
            )
            raise RuntimeError(msg)

    def write_clip(self) -> None:
        """Write a folded clip into the gradients after all, since more will be added to them."""
        clip, self.folded_clip = self.folded_clip, None
        if clip is not None:
            self.multiply_(clip.factor())

    def multiply_(self, factor: Tensor) -> None:
        """Multiply the gradients by a number on the device."""
        for gradients in self.groups:
            gradients.multiply_(factor)

    def result_of_step(self, norm: Tensor, found: Tensor, *, known: bool | None) -> StepResult:
        """Return the result of a step that was taken or skipped."""
        loss_scale = self.loss_scales[0] if self.loss_scales else self._shared.scales.default
        seen = self.found_inf_per_device or not (self._shared.scales.enabled or self.norm is None)
        return StepResult(
            norm=(norm if self.norm is None else self.norm) if seen else None,
            clipped=partial(_clipped, norm, self.folded_clip) if seen else None,
            found_inf=found,
            scale_before=None if loss_scale.value is None else loss_scale.snapshot(),
            scale_after=loss_scale.later,
            report=partial(report_of, self.params, self._measured, self.names, self._optimizer),
            known=known,
            obstacle=self.obstacle,
        )

    def close(self, result: StepResult) -> StepResult:
        """End with a step, and return its result."""
        self.result, self.stage = result, OptState.STEPPED
        for gradients in self.groups:
            gradients.note_step(self.number)
            gradients.updates_at_last_use = self._shared.scales.updates_requested
        self._open()
        return result


class ScaledClip:
    """Finds that torch's clip took scaled gradients: their norm is the same round number at each step."""

    IN_A_ROW = 3

    def __init__(self) -> None:
        self.steps_left = 16
        self.norm: Tensor | float = math.nan  # of the last finite scaled gradients
        self._in_a_row: Tensor | float = 0.0

    def found(self, norm: Tensor, scale: Tensor) -> Tensor:
        """Return whether enough steps in a row were clipped so, of the unscaled norm; 0-dim."""
        self.steps_left -= 1
        scaled = norm * moved(scale, norm.device)
        is_clipped = _is_round(scaled) & ~_is_round(norm) & (norm < 1e-2)
        is_same = (scaled - self.norm).abs() <= 1e-4 * scaled
        is_finite, count = scaled.isfinite(), is_clipped * (1.0 + is_same * self._in_a_row)
        self._in_a_row = torch.where(is_finite, count, self._in_a_row)
        self.norm = torch.where(is_finite, scaled, self.norm)
        return self._in_a_row >= self.IN_A_ROW


def _is_round(number: Tensor) -> Tensor:
    """Whether two digits write it, as a ``max_norm`` that a user chooses; False for 0, inf and nan."""
    digits = number / torch.pow(10.0, number.log10().floor() - 1)
    return (digits - digits.round()).abs() <= 1e-4 * digits


def _are_written_over(params: list[Tensor]) -> bool:
    """Whether each gradient was written to in place at least once."""
    grads = [param.grad for param in params if param.grad is not None]
    readable = bool(grads) and not capturing(grads[0].device)
    return readable and not any(grad.is_inference() or grad._version == 0 for grad in grads)


class StepPastScaler:
    """An optimizer's hook: it refuses scaled gradients to steps that its newest scaler does not take."""

    leaves_gradients = leaves_steps = True  # else no step is taken in one pass

    def __init__(self, state: PerOptimizerState) -> None:
        hooks: dict[int, Any] = state.optimizer._optimizer_step_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, StepPastScaler)]:
            del hooks[key]
        handle = state.optimizer.register_step_pre_hook(self)
        self._state = weakref.ref(state, lambda _: handle.remove())

    def __call__(self, *_: Any) -> None:
        """Run before the optimizer's step."""
        state = self._state()
        if state is not None:
            state.refuse_step_past_scaler()


def _clipped(norm: Tensor, clip: MeasuredClip | None) -> Tensor:
    """Return the norm of what a step used: as measured there, times a clip that was left to it."""
    return norm if clip is None else norm * clip.factor()
