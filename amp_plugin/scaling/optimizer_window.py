"""All that is known of one optimizer between its steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling import one_pass
from amp_plugin.scaling.attribution import Attribution
from amp_plugin.scaling.folded_clip import FoldedClip
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.parameter_names import ParameterNames, params_of
from amp_plugin.scaling.shard_layout import ShardLayout
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.skipped_steps import RUN, SkippedSteps
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.scaling.units import ScaledBy
from amp_plugin.scaling.unscaled_gradients import UnscaledGradients
from amp_plugin.user_warnings import warn_user


class OptimizerWindow:
    """An optimizer's gradients from one step to the next: measured, unscaled, clipped, used.

    Attributes:
        names: The names given to parameters.
        params: Its parameters, in the order of its groups.
        sets: The gradient sets they fall into.
        layouts: The shard layouts of its parameters.
        is_shared: Whether another optimizer steps some of the parameters too.
        spans_ranks: Whether several ranks decide together.
        clip: A clip left to the kernel of a fused optimizer; None if there is none.
        is_clipped: Whether a clip by norm was written since the last backward.
        takes_scaler: Whether ``optimizer.step`` has a ``grad_scaler`` parameter; None if not looked up.
        has_momentum: Whether all momentum buffers of a fused SGD are known to exist.
        backwards: How many scaled backward passes have begun since it was met.
        obstacle: Why the last step was not taken in one pass; empty if it was.
        result: The last step's; None before the first.
        result_scale: The first loss scale whose gradients that step had.
        skipped: How many of its steps were skipped.
        unscaled: What is known of its gradients where nothing is scaled.
        found_inf_per_device: As torch's scaler keeps it.
    """

    def __init__(self, optimizer: weakref.ref[Optimizer], number: int, shared: Shared) -> None:
        self._optimizer = optimizer
        self.number = number
        self._shared = shared
        self.names = ParameterNames()
        self.params: list[Tensor] = []
        self.sets: list[GradientSet] = []
        self.layouts: tuple[ShardLayout, ...] = ()
        self.is_shared = False
        self.spans_ranks = bool(shared.ranks.groups)
        self.takes_scaler: bool | None = None
        self.has_momentum = False
        self.backwards = 0
        self.obstacle = ""
        self.result: StepResult | None = None
        self.result_scale = shared.scales.default
        self.skipped = SkippedSteps()
        self.unscaled = UnscaledGradients()
        self._stage = (OptState.READY, 0)
        self._unchanged = False
        self._trusted = False
        self._open()

    def _open(self) -> None:
        """Begin a window: nothing is measured, nothing is to be clipped."""
        self.norm: Tensor | None = None
        self.loss_scales: list[LossScale] = []
        self.clip: FoldedClip | None = None
        self.is_clipped = False
        self.found_inf_per_device: dict[Any, Tensor] = {}

    # -- what it is ---------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            msg = "the optimizer of this record no longer exists"
            raise ReferenceError(msg)
        return optimizer

    def take_params(self, params: list[Tensor], layouts: tuple[ShardLayout, ...]) -> None:
        """Note that the optimizer has these parameters now."""
        self.params, self.layouts = params, layouts
        self.spans_ranks = bool(self._shared.ranks.groups or layouts)
        self.has_momentum = False

    def take_sets(self, sets: list[GradientSet]) -> None:
        """Note into which gradient sets the parameters fall."""
        self.sets = sets
        self.is_shared = any(len(gradients.owners) > 1 for gradients in sets)

    def has_other_count(self) -> bool:
        """Whether the optimizer has more or fewer parameters than were last seen."""
        return len(params_of(self.optimizer)) != len(self.params)

    @property
    def stage(self) -> OptState:
        """What torch's scaler would say: READY, UNSCALED or STEPPED; an update makes it READY."""
        stage, updates = self._stage
        return stage if updates == self._shared.scales.updates_requested else OptState.READY

    @stage.setter
    def stage(self, stage: OptState) -> None:
        self._stage = (stage, self._shared.scales.updates_requested)

    def one_pass_obstacle(self) -> str:
        """Say why steps cannot be taken in one pass, whatever the tensors; empty if they can."""
        if not self._shared.one_pass:
            return "one_pass=False"
        device = self._shared.scales.device
        elsewhere = any(param.device != device for param in self.params[:1])
        return f"the loss scale is on {device}" if elsewhere else one_pass.obstacle(self.optimizer)

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(gradients.has_gradients() for gradients in self.sets)

    def device(self, call: str) -> torch.device:
        """Return where the loss scales are.

        Raises:
            RuntimeError: ``call`` comes before any ``scale()``.
        """
        return self._shared.scales.require(call).require().device

    def delays_update(self) -> bool:
        """Whether the loss scale must not change before its step; alike on all ranks, whatever gradients."""
        return self.is_awaited() if self.spans_ranks else self.is_pending()

    def is_awaited(self) -> bool:
        """Whether it has neither stepped nor unscaled since a scaled backward began."""
        return any(self.number in gradients.awaited_owners for gradients in self.sets)

    def is_pending(self) -> bool:
        """Whether scaled gradients wait for the next step."""
        return any(gradients.is_pending(self.number) for gradients in self.sets)

    def is_renewed(self) -> bool:
        """Whether there are other gradients than those last unscaled or stepped with."""
        return any(gradients.is_renewed(self.number) for gradients in self.sets)

    def parameter_names(self) -> list[str]:
        """Return the name of each parameter."""
        return self.names.of(self.params, self._optimizer())

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return self.parameter_names()[next(i for i, known in enumerate(self.params) if known is param)]

    def __getitem__(self, key: str) -> Any:
        """Read as torch's per-optimizer dict: ``"stage"`` or ``"found_inf_per_device"``."""
        if key in {"stage", "found_inf_per_device"}:
            return getattr(self, key)
        raise KeyError(key)

    # -- measuring ----------------------------------------------------------------------------

    def assume_unchanged(self) -> None:
        """Trust what was measured for one more call: no user code has run since the last one."""
        self._unchanged = True

    def begin_call(self) -> None:
        """Read gradients again in this call of the scaler, since user code may have written to them."""
        self._trusted, self._unchanged = self._unchanged, False
        if not self._trusted:
            for gradients in self.sets:
                gradients.doubt_measurement()

    def check(self, *, write: bool, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """Measure the gradients, over all ranks; note an overflow for the next update.

        Args:
            write: Whether to unscale them in place too.
            norm_type: The p of the norm.

        Returns:
            Norm of the unscaled gradients and found_inf, float32, 0-dim, on the loss scale's device.

        Raises:
            ValueError: A gradient to unscale is float16.
        """
        if write:
            self.write_clip()
        for gradients in self.sets:
            if gradients.grew():
                self.norm = None  # it was that of fewer micro-batches
        measured, norm, found = self._measure(write=write, norm_type=norm_type)
        if self.norm is None and measured:
            self.norm = norm
        self.found_inf_per_device = {found.device: found} if measured else {}
        if measured or self.spans_ranks:
            for loss_scale in self.loss_scales:
                loss_scale.record(found)
        for gradients in self.sets:
            for loss_scale, overflow in gradients.take_contributions():
                loss_scale.record(found if self.spans_ranks else overflow)
        return norm, found

    def _measure(self, *, write: bool, norm_type: float) -> tuple[bool, Tensor, Tensor]:
        """As :meth:`check`, but nothing is noted; also returns whether there was a gradient."""
        measurements: list[Measurement] = []
        earlier: list[Tensor] = []
        self.assume_scaled()
        for gradients in self.sets:
            loss_scale = gradients.scaled_by
            if loss_scale is not None:
                if write:
                    self._refuse_half(gradients)
                if loss_scale not in self.loss_scales:
                    self.loss_scales.append(loss_scale)
            measurements += gradients.unscale_(norm_type) if write else gradients.measure(norm_type)
            overflow = gradients.earlier_overflow(self.number)
            if overflow is not None:
                earlier.append(overflow)
        device = self._shared.scales.device
        norm, found = self._shared.ranks.combine(measurements, norm_type, device, self.layouts, earlier)
        return bool(measurements), norm, found

    def assume_scaled(self) -> None:
        """Follow torch where no scaled backward was seen: after update(), new gradients are scaled ones.

        So it is under torch.compile, or when a loss was multiplied by get_scale() by hand.
        """
        scales = self._shared.scales
        for gradients in self.sets:
            unseen = (
                not isinstance(gradients.unit, ScaledBy)
                and self.number not in gradients.awaited_owners
                and gradients.updates_at_last_use != scales.updates_requested
                and scales.default.value is not None
            )
            if unseen and gradients.is_renewed(self.number):
                gradients.assume_scaled(scales.default)

    def _refuse_half(self, gradients: GradientSet) -> None:
        param = None if self._shared.fp16_gradients else gradients.first_half()
        if param is not None:
            msg = (
                f"Attempting to unscale FP16 gradients. Parameter {self.name_of(param)!r} is float16: keep "
                "parameters in float32 and let autocast cast them (model.float()), or pass "
                "fp16_gradients=True and lose gradients below 6e-8."
            )
            raise ValueError(msg)

    def unscale_(self, norm_type: float = 2.0) -> tuple[Tensor, Tensor]:
        """Unscale the gradients if they are not; returns norm and found_inf as :meth:`check`."""
        measured = self.check(write=True, norm_type=norm_type)
        self.stage = OptState.UNSCALED
        for gradients in self.sets:
            gradients.updates_at_last_use = self._shared.scales.updates_requested
        return measured

    def note_clipped(self) -> None:
        """Note that a clip by norm of ours has written the gradients."""
        self.is_clipped = True

    def note_backward(self) -> None:
        """Note that a scaled backward begins, once the gradients are in its unit."""
        self.backwards += 1
        self.is_clipped = False
        if self.norm is not None:
            for gradients in self.sets:
                gradients.mark_backward()

    def note_unscaled(self) -> None:
        """Note that the gradients of the last backward were unscaled on request."""
        for gradients in self.sets:
            gradients.note_unscaled(self.number)

    def refuse_taken_away(self) -> None:
        """Raise if hooks took the gradients of a scaled backward away, still multiplied by the scale.

        Raises:
            RuntimeError: They did.
        """
        taken = [param for gradients in self.sets for param in gradients.taken_away.seen]
        if taken and not self.has_gradients():
            kind = type(self.optimizer).__name__
            msg = (
                f"{kind}: a hook took the gradient of {self.name_of(taken[0])!r} away during backward(), "
                "multiplied by the loss scale, so that it can neither be unscaled nor checked. Such an "
                "optimizer needs a run without a loss scale: use bfloat16, or GradScaler(enabled=False)."
            )
            raise RuntimeError(msg)

    # -- clipping -----------------------------------------------------------------------------

    def clip_again(self, norm: Tensor | None = None) -> FoldedClip | None:
        """Return the folded clip, of what the gradients are at the step; ``norm`` if that is known."""
        clip = self.clip
        if clip is not None and not self._trusted:

            def norm_of(order: float) -> Tensor:
                if norm is not None and order == clip.norm_type:
                    return norm
                return self._measure(write=False, norm_type=order)[1]

            self.clip = clip.measured_again(norm_of)
        return self.clip

    def write_clip(self) -> None:
        """Write a folded clip into the gradients after all, since more will be added to them."""
        clip, self.clip = self.clip, None
        if clip is not None:
            factor = clip.factor()
            for gradients in self.sets:
                gradients.write_clip_(factor)

    # -- the end ------------------------------------------------------------------------------

    def close(self, norm: Tensor, found: Tensor, *, known: bool | None) -> None:
        """End the window with a step that was taken or skipped.

        Args:
            norm: Norm of the unscaled gradients, float32, 0-dim.
            found: 1.0 if the step was skipped, else 0.0; float32, 0-dim.
            known: Whether it was skipped; None if only the device knows.
        """
        loss_scale = self.result_scale = (
            self.loss_scales[0] if self.loss_scales else self._shared.scales.default
        )
        flagged = [
            (gradients.params, measured)
            for gradients in self.sets
            for measured in gradients.all_measurements(self.number)
        ]
        if self.norm is not None:
            norm = self.norm
        self.result = StepResult(
            norm=norm if self.found_inf_per_device else None,
            found_inf=found,
            scale_before=None if loss_scale.value is None else loss_scale.snapshot(),
            scale_after=loss_scale.later,
            report=Attribution(self.params, flagged, self.names, self._optimizer).report,
            known=known,
            obstacle=self.obstacle,
        )
        self.skipped.add(found)
        self.stage = OptState.STEPPED
        for gradients in self.sets:
            gradients.note_step(self.number)
            gradients.updates_at_last_use = self._shared.scales.updates_requested
        self._open()
        if self.skipped.all_in_a_row():
            warn_user(self._all_skipped_text())

    def _all_skipped_text(self) -> str:
        report = "" if self.result is None else f" ({self.result.overflow_report().summary()})"
        return (
            f"{RUN} steps of {type(self.optimizer).__name__} in a row were skipped: its gradients "
            f"are not finite{report}, and the loss scale is {self.result_scale.item():g}. If it still falls, "
            "training may recover; else look for nan in the loss or the data, or use bfloat16."
        )
