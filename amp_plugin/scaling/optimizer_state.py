"""The gradients of one optimizer from one step to the next: measured, unscaled, clipped, used.

What each gradient carries stands in the ledger. This module multiplies and divides the gradients, asks all
ranks, and keeps what was found until the step.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.mistakes import MISTAKES
from amp_plugin.scaling.gradients import (
    Measurement,
    ShardLayout,
    batches_of,
    first_float16,
    forgotten_if_zero,
    joined,
    measured,
    multiply_,
    parameter_layouts,
)
from amp_plugin.scaling.ledger import make_ledger
from amp_plugin.scaling.loss_scale import LossScale, capturing, moved
from amp_plugin.scaling.overflows import Names, names_of, report_of
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.spikes import Verdict
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.weights.one_pass import own_step, takes_own_step

_STEP_WITH_OVERFLOW = (
    "{kind}.step() is called past the scaler, which has found gradients that are not finite: they would make "
    "the weights nan. Call {step} instead, which skips this step."
)

_STRAYS = (
    "{kind}: {count} parameters ({some}) have gradients that no scaled backward pass has made since the last "
    "step: dividing them by the loss scale would make them vanish. Write {backward} instead of "
    "loss.backward()."
)

_OWN_UNSCALING = (
    "gradients of one optimizer carry several loss scales, and _unscale_grads_ was replaced, which divides "
    "all of them by one: use one loss scale, or leave _unscale_grads_ as it is."
)

_WRITTEN: Final = -1  # instead of a number of updates: a program has written that the stage is READY
_MOST_KEPT = 16  # measurements of one window, before they are joined
_numbers = itertools.count(1)


class OptimizerState:
    """What a scaler knows of one optimizer between its steps.

    Attributes:
        shared: What all optimizers of the scaler use.
        ledger: What the gradients carry.
        names: The names that parameters were given, also those that may join later.
        layouts: How the parameters are sharded, in the same order on every rank.
        backwards: How many scaled backward passes have begun since it was met.
        norm: The norm of the unscaled gradients before the first clip, float32, 0-dim; None if not taken.
        norm_type: The p of that norm.
        found_inf_per_device: 1.0 if an overflow was found since its last step; programs may write to it.
        measurements: What was found since its last step, for the names of what overflowed.
        contributions: Other loss scales whose gradients are among its own, and what overflowed in those.
        result: Of its last step.
    """

    def __init__(self, optimizer: weakref.ref[Optimizer], shared: Shared) -> None:
        self._optimizer, self.shared = optimizer, shared
        self._number = next(_numbers)  # in the ledger, where the id of a state that is gone may come again
        self.names: Names = {}
        self.ledger: Any = make_ledger([], (), None)
        self.layouts: tuple[ShardLayout, ...] = ()
        self.backwards = self._answered = 0  # up to which of them it has unscaled or stepped
        self._sharers: list[OptimizerState] = []  # that step some of its parameters too
        self.result: StepResult | None = None
        self._used = (OptState.READY, 0)  # what it did last, and how many updates had been requested then
        self.forget()

    def forget(self) -> None:
        """Forget what was measured: the optimizer has stepped, or its gradients were dropped."""
        self.norm: Tensor | None = None
        self.norm_type, self._norm_at = 2.0, 0
        self.found_inf_per_device: dict[Any, Tensor] = {}
        self.measurements: list[Measurement] = []
        self._loss_scales: dict[LossScale, None] = {}  # that its gradients came with
        # Other loss scales whose gradients are among them, and what overflowed in those.
        self.contributions: list[tuple[LossScale, Tensor]] = []

    @property
    def optimizer(self) -> Any:
        """The optimizer, which exists as long as the core holds its state."""
        return self._optimizer()

    @property
    def params(self) -> list[Tensor]:
        """Its parameters when it was last looked at."""
        return self.ledger.params  # type: ignore[no-any-return]

    @property
    def spans_ranks(self) -> bool:
        """Whether several processes decide together."""
        return bool(self.shared.ranks or self.layouts)

    @property
    def stage(self) -> OptState:
        """What torch's scaler would say: READY, UNSCALED or STEPPED; an update makes it READY."""
        stage, updates = self._used
        return stage if updates == self.shared.updates else OptState.READY

    @property
    def is_awaited(self) -> bool:
        """Whether a scaled backward pass has begun since it last unscaled, as asked for, or stepped."""
        return self.backwards > self._answered

    def _use(self, stage: OptState, *, answers: bool = True) -> None:
        """Record that it has unscaled its gradients, or stepped with them."""
        self._used = (stage, self.shared.updates)
        if answers:
            self._answered = self.backwards

    def take_params(
        self,
        params: list[Tensor],
        others: list[OptimizerState],
        scale: LossScale | None,
        *,
        has_backward: bool,
    ) -> None:
        """Record that the optimizer has these parameters now.

        Args:
            params: The parameters.
            others: The states of the scaler's optimizers, which may know some of them already.
            scale: What the gradients of unknown parameters carry.
            has_backward: A scaled backward pass has begun before.
        """
        mine = {id(param) for param in self.params}
        new = [param for param in params if id(param) not in mine]
        for other in others if new else ():
            self.hear(other.measurements if other is not self else (), new)
        if has_backward and any(param.grad is not None for param in new):
            self.backwards += 1  # it may have brought their gradients
        self.ledger = make_ledger(params, [state.ledger for state in others], scale)
        self.layouts = parameter_layouts(params)

    def share(self, others: list[OptimizerState]) -> None:
        """Learn which other optimizers step some of its parameters."""
        mine = {id(param) for param in self.params}
        self._sharers = [o for o in others if o is not self and not mine.isdisjoint(map(id, o.params))]

    def hear(self, measurements: Iterable[Measurement], params: list[Tensor]) -> None:
        """Take over what was found in gradients of shared parameters: this optimizer must skip for it too."""
        for found in (part for kept in measurements for part in kept.of(params)):
            self.measurements.append(found)
            self._find(found.found_inf)

    def device(self) -> torch.device:
        """Return where norm and found_inf of its gradients belong."""
        on = self.shared.scale_device
        if on is None:
            on = next((param.device for param in self.params if param.grad is not None), None)
        return on or (self.params[0].device if self.params else torch.device("cpu"))

    def parts(self) -> list[tuple[LossScale | None, list[Tensor], bool]]:
        """Return the ledger's parts; a scale that no loss was multiplied by yet is none."""
        return [
            (None if scale is None or scale.value is None else scale, params, changed)
            for scale, params, changed in self.ledger.parts()
        ]

    def scales_carried(self) -> set[LossScale | None]:
        """Return the loss scales that its gradients carry; None stands for none."""
        return {scale for scale, _, _ in self.parts()}

    def delays_update(self) -> bool:
        """Whether the loss scale must not change before its step; the same on all ranks."""
        return self.is_awaited if self.spans_ranks else bool(self.ledger.waits())

    def parameter_names(self) -> list[str]:
        """Return the name of each parameter."""
        return names_of(self.params, self._optimizer(), self.names)

    def add_names(self, named: Mapping[str, Tensor]) -> None:
        """Take over names of parameters."""
        self.names.update((id(param), (param, name)) for name, param in named.items())

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return self.parameter_names()[next(i for i, own in enumerate(self.params) if own is param)]

    def begin_call(self) -> None:
        """Take gradients for scaled ones where torch.amp would, although no scaled backward was seen.

        A compiled backward pass, a replayed graph and a loss times ``get_scale()`` bring scaled gradients
        unseen. After a step and an update whatever is there is taken for scaled: ``.data``, NumPy and
        collectives write without a trace. After ``unscale_`` and an update only gradients in other memory
        are.
        """
        default, used, now = self.shared.default, self._used[1], self.shared.updates
        if default.value is None or not self.shared.enabled or used == now:
            return
        if self.ledger.assume_scaled(default, self._number, _WRITTEN if used == _WRITTEN else now):
            self._refuse_strays()
            self.forget_overflows()  # those of a batch that is gone

    def _refuse_strays(self) -> None:
        """Raise if gradients came without a scaled backward pass, where a front door scales all losses."""
        if not self.shared.scales_all or self.is_awaited or not self.ledger.waits():
            return
        named = [
            name
            for name, param in zip(self.parameter_names(), self.params, strict=True)
            if param.grad is not None and measured([param], None)[0].norm.item() != 0
        ]
        if named:  # zeros are what zero_grad(set_to_none=False) has written
            kind, backward = type(self.optimizer).__name__, self.shared.words.backward
            some = ", ".join(named[:3])
            raise RuntimeError(_STRAYS.format(kind=kind, count=len(named), some=some, backward=backward))

    def begin_backward(self, scale: LossScale) -> None:
        """Get ready for gradients of a loss times ``scale``: bring those that are there to that scale."""
        self._forget_dropped()
        was_awaited = self.is_awaited
        self.backwards += 1
        for before, params, changed in self.parts():
            if before is scale:
                continue
            factor = scale.require() if before is None else scale.require() / before.require()
            found = [
                batch.measure(moved(factor, batch.device), math.inf, write=True)
                for batch in batches_of(params)
            ]
            overflows: list[Tensor] = []
            if before is not None and self.spans_ranks:
                overflows = [torch.zeros_like(before.require())] * was_awaited
            elif before is not None and changed:
                overflows = [measurement.found_inf for measurement in found]
            self.contributions += [(before, overflow) for overflow in overflows if before is not None]
        self.ledger.begin_backward(scale)

    def _forget_dropped(self) -> None:
        """Forget what was found in gradients that are gone, or zero, when a backward pass begins."""
        if not self.ledger.has_gradients():
            self.forget_overflows()
            if not self.spans_ranks:  # on others some gradients may be there
                self.contributions = []
        elif self.measurements:
            self._forget_if_zero([found for _, params, _ in self.parts() for found in measured(params, None)])

    def _forget_if_zero(self, now: list[Measurement]) -> None:
        """Forget earlier overflows if all gradients are zero now: that drops a batch."""
        if self.measurements:
            self.measurements = forgotten_if_zero(self.measurements, now)
            self.found_inf_per_device = {}
            for found in self.measurements:
                self._find(found.found_inf)

    def forget_overflows(self) -> None:
        """Forget which overflows were found so far, as torch.amp does in ``update()``."""
        self.measurements, self.found_inf_per_device = [], {}

    def _find(self, found_inf: Tensor) -> None:
        """Remember whether an overflow was found."""
        before = self.found_inf_per_device.get(found_inf.device)
        found = found_inf if before is None else torch.maximum(before, found_inf)
        self.found_inf_per_device[found_inf.device] = found

    def forget_stale_norm(self) -> None:
        """Before a clip where nothing is scaled, forget the norm of other gradients than are there now.

        Several clips before a step keep the norm before the first one. With a loss scale, a backward pass
        tells.
        """
        if not self.shared.enabled and self.ledger.is_changed():
            self.norm = None

    def replace_norm(self, norm: Tensor | None) -> None:
        """Take a norm that was measured elsewhere; None forgets the one of an earlier call."""
        self.norm = norm

    def take_norm(self, norm: Tensor, norm_type: float) -> None:
        """Keep the norm of the gradients, unless one from before a clip is kept."""
        if self.norm is None:
            self.norm, self.norm_type, self._norm_at = norm, norm_type, self.backwards

    def measure(
        self, *, unscale: bool, norm_type: float = 2.0, on_request: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Measure the gradients, over all ranks, unscaled in place or not; record an overflow.

        Args:
            unscale: Divide them by what they carry, in place.
            norm_type: The p of the norm.
            on_request: Whether the user has asked for the unscaling.

        Returns:
            The norm of the unscaled gradients, and 1.0 if one of them was not finite since the last step.
        """
        if self.norm is not None and self.backwards > self._norm_at and self.ledger.has_grown():
            self.norm = None  # it was that of fewer micro-batches
        found_now = self._measured_now(norm_type, unscale=unscale, on_request=on_request)
        self._forget_earlier(found_now, norm_type)
        norm, found = self._combined(found_now, norm_type)
        for other in self._sharers:
            other.hear(found_now, other.params)
        self.measurements += found_now
        if len(self.measurements) > _MOST_KEPT:
            self.measurements = joined(self.measurements)
        if found_now:
            self.take_norm(norm, norm_type)
            self.found_inf_per_device = {found.device: found}
        self._record(found, counts=bool(found_now) or self.spans_ranks)
        return norm, found

    def _measured_now(self, norm_type: float, *, unscale: bool, on_request: bool) -> list[Measurement]:
        parts, found_now = self.parts(), list[Measurement]()
        for scale, params, _ in parts if unscale else ():
            self._refuse_float16(scale, params)
        for scale, params, _ in parts:
            if scale is not None:
                self._loss_scales[scale] = None
            found_now += measured(params, scale, norm_type, write=unscale and scale is not None)
        if unscale:
            user = self._number if on_request else 0
            self.ledger.carry_nothing(user, self.shared.updates, False)
        return found_now

    def _forget_earlier(self, now: list[Measurement], norm_type: float) -> None:
        """Forget what was found before if it cannot be of this batch."""
        if not self.shared.enabled:
            self.forget_overflows()  # nothing tells a batch from an earlier one that was dropped
        elif self.stage is OptState.READY and norm_type >= 0:  # another p may be 0 although an element is not
            self._forget_if_zero(now)  # an update has followed what was found

    def _record(self, found: Tensor, *, counts: bool) -> None:
        """Let a check count for the loss scales that have gone into the gradients."""
        for loss_scale in self._loss_scales if counts else ():
            loss_scale.record(found)
        for loss_scale, overflow in self.contributions:
            loss_scale.record(found if self.spans_ranks else overflow)
        self.contributions = []

    def _combined(self, found_now: list[Measurement], norm_type: float) -> tuple[Tensor, Tensor]:
        """Return norm and found_inf of all devices and ranks, earlier overflows included."""
        device, earlier = self.device(), list(self.found_inf_per_device.values())
        if len(found_now) == 1 and not self.spans_ranks:
            flags = (moved(flag, device) for flag in (found_now[0].found_inf, *earlier))
            return moved(found_now[0].norm, device), reduce(torch.maximum, flags)
        return self.shared.ranks.combine(found_now, norm_type, device, self.layouts, earlier)

    def _refuse_float16(self, scale: LossScale | None, params: list[Tensor]) -> None:
        param = None if scale is None or self.shared.options.fp16_gradients else first_float16(params)
        if param is not None:
            msg = (
                f"Attempting to unscale FP16 gradients. Parameter {self.name_of(param)!r} is float16: keep "
                "parameters in float32 and let autocast cast them (model.float()), or pass "
                "fp16_gradients=True and lose gradients below 6e-8."
            )
            raise ValueError(msg)

    def unscale_(self, norm_type: float = 2.0, *, on_request: bool = True) -> tuple[Tensor, Tensor]:
        """Unscale the gradients if they are not.

        Args:
            norm_type: The p of the norm.
            on_request: Whether the user has asked for it, who may not do so twice. A clip does it by itself.

        Returns:
            Norm and found_inf, as :meth:`measure`.
        """
        self.begin_call()
        found = self.measure(unscale=True, norm_type=norm_type, on_request=on_request)
        self._use(OptState.UNSCALED, answers=on_request)
        return found

    def unscale_by(self, unscale: Callable[[Tensor], dict[Any, Tensor]]) -> None:
        """Let a program's own function unscale the gradients, and keep the overflows that it returns.

        Args:
            unscale: It is given the loss scale, float32, 0-dim; it returns 1.0 for a device with an overflow.
        """
        self.begin_call()
        carried = [scale for scale, params, _ in self.parts() if any(p.grad is not None for p in params)]
        if len(carried) > 1:
            raise RuntimeError(_OWN_UNSCALING)
        for scale in carried:
            if scale is not None:
                self._loss_scales[scale] = None
                for found in unscale(scale.require()).values():
                    self._find(found)
        self._use_as(OptState.UNSCALED)

    def write_stage(self, stage: OptState) -> None:
        """Go to the stage that a program has written into torch's record.

        UNSCALED and STEPPED mean that the gradients carry nothing. READY means that gradients which the
        optimizer has stepped with count as scaled, as after an update.
        """
        if stage is OptState.READY:
            self._used = (stage, _WRITTEN)
            return
        for scale, params, _ in self.parts():
            if scale is not None and any(param.grad is not None for param in params):
                self._loss_scales[scale] = None
        self._use_as(stage)

    def write_found(self, found_inf_per_device: dict[Any, Tensor]) -> None:
        """Take the overflows that a program has written into torch's record, in place of those found."""
        self.forget_overflows()
        self.found_inf_per_device = found_inf_per_device

    def switch(self, enabled: bool) -> None:
        """Go on with a loss scale that was switched off, or on: without one gradients are as they are."""
        if not enabled:
            self.ledger.carry_nothing(0, self.shared.updates, False)
            self._answered = self.backwards
        elif self.stage is OptState.STEPPED:
            self.write_stage(OptState.READY)  # it has stepped without updates

    def _use_as(self, stage: OptState) -> None:
        """Record that a program has unscaled the gradients, or stepped with them, by itself."""
        is_step = stage is OptState.STEPPED
        self.ledger.carry_nothing(self._number, self.shared.updates, is_step)
        self._use(stage)

    def overflowed_before_closure(self, optimizer: Optimizer) -> bool:
        """Unscale what backward passes have left that the optimizer may use before it calls its closure.

        Returns:
            Whether one of those gradients is not finite: a host sync.
        """
        left = uses_gradients_before_closure(optimizer) and self.is_awaited and self.ledger.has_gradients()
        return left and bool(self.unscale_()[1].item() > 0)

    def clip_(self, norm: Tensor, max_norm: float, found_inf: Tensor) -> None:
        """Clip all gradients to ``max_norm``, unless ``found_inf`` is 1."""
        self.ledger.write(partial(multiply_, self.params, norm, max_norm, found_inf))

    def judge(self, norm: Tensor, found_inf: Tensor) -> Verdict:
        """Judge the step by its norm and found_inf, as :meth:`measure` returns them: is it a spike?"""
        before = norm if self.norm is None else self.norm
        trackers = [scale.growth_tracker for scale in self._loss_scales]
        backward = self.shared.words.backward
        return self.shared.spikes.judge(self.optimizer, (before, norm), found_inf, trackers, backward)

    def note_verdict(self, verdict: Verdict) -> None:
        """Let a program's own function, which reads ``found_inf_per_device``, skip a spike too."""
        self._find(verdict.found_inf)

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients by a number on the device (0-dim)."""
        self.ledger.write(partial(multiply_, self.params, factor))

    def call_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call the step of the optimizer, or of one that wraps it."""
        return self.run_step(partial(optimizer.step, *args, **kwargs))

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run a step of the optimizer, which comes through the scaler."""
        with own_step(self.optimizer):
            return step()

    def refuse_step_past_scaler(self) -> None:
        """Raise if the optimizer steps by itself with gradients that are scaled, or known to be not finite.

        The host waits for the device only if the gradients were unscaled and the scaler does not step.
        """
        if takes_own_step(self.optimizer):
            return
        kind, words = type(self.optimizer).__name__, self.shared.words
        if self.is_awaited and self.ledger.waits():
            what = f"{kind}.{MISTAKES['AMP002'].what}"
            msg = f"{what}: call {words.step} instead, or {words.unscale} before."
            raise RuntimeError(msg)
        if self._has_overflow():
            raise RuntimeError(_STEP_WITH_OVERFLOW.format(kind=kind, step=words.step))

    def _has_overflow(self) -> bool:
        """Whether an overflow was found since the last step that is still in the gradients: a host sync."""
        found = self.found_inf_per_device.values()
        return (
            not any(capturing(flag.device) for flag in found)
            and any(flag.item() > 0 for flag in found)
            and any(part.found_inf.item() > 0 for part in measured(self.params, None))
        )

    def close(
        self,
        verdict: Verdict,
        *,
        known: bool | None,
        how: str,
        one_pass: bool = False,
        max_norm: float | None = None,
    ) -> StepResult:
        """End with a step that was taken or skipped, and return its result."""
        scale = next(iter(self._loss_scales), self.shared.default)
        seen, found = self.norm is not None, self.measurements
        result = StepResult(
            norm=self.norm,
            used_norm=verdict.norm if seen else None,
            max_norm=max_norm if seen else None,
            found_inf=verdict.found_inf,
            judged=verdict.judged,
            scale_before=None if scale.value is None else scale.snapshot(),
            scale_after=scale.later,
            report=partial(report_of, self.params, found, self.names, self._optimizer),
            flags=[measured.flags for measured in found],
            known=known,
            how=how,
            one_pass=one_pass,
        )
        return self.end_with(result)

    def end_with(self, result: StepResult) -> StepResult:
        """End with a step, and return its result."""
        self.result = result
        self._use(OptState.STEPPED)
        self.ledger.carry_nothing(self._number, self.shared.updates, True)
        self.forget()
        return result


def uses_gradients_before_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may use gradients that were made before it calls its closure, as SAM does."""
    return not type(optimizer).__module__.startswith("torch.optim")
