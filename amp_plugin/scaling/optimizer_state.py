"""OptimizerState measures, unscales and clips the gradients of one optimizer between two steps.

The ledger records which loss scale each gradient is multiplied by. This module multiplies and divides the
gradients, combines norms and overflow flags over all ranks, and keeps the results until the step.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.mistakes import MISTAKES
from amp_plugin.module_paths import module_paths
from amp_plugin.scaling.gradients import (
    Measurement,
    ShardLayout,
    first_float16,
    forgotten_if_zero,
    joined,
    measured,
    multiply_,
    parameter_layouts,
)
from amp_plugin.scaling.ledger import make_ledger
from amp_plugin.scaling.loss_scale import LossScale, capturing
from amp_plugin.scaling.overflows import Names, names_of, report_of
from amp_plugin.scaling.shared import Shared
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

# Stored instead of the number of updates if a program has set an optimizer's stage to READY.
_WRITTEN: Final = -1
# If an optimizer has more measurements than this, repeated measurements of the same gradients are merged.
_MOST_KEPT = 16
_numbers = itertools.count(1)


class OptimizerState:
    """The state of one optimizer between its steps.

    Attributes:
        shared: The state that all optimizers of the scaler share.
        ledger: The ledger of its gradients.
        names: The parameter names that were given to ``register()``.
        layouts: The shard layouts of the parameters, in the same order on all ranks.
        backwards: The number of scaled backward passes since the scaler first saw the optimizer.
        norm: The norm of the unscaled gradients before the first clip (float32, 0-dim); None if it was not
            measured.
        norm_type: The p of the p-norm in ``norm``.
        found_inf_per_device: Maps each device to 1.0 if an overflow was found there since the last step, else
            to 0.0. A program may write to this dict.
        measurements: The measurements since the last step. They say which parameters overflowed.
        contributions: One tuple for each group of rescaled gradients, with their previous loss scale and
            their overflow flag.
        result: The result of the last step.
    """

    def __init__(self, optimizer: weakref.ref[Optimizer], shared: Shared) -> None:
        self._optimizer, self.shared = optimizer, shared
        # Identifies this state in the ledger. An id() could be reused after this state is deleted.
        self._number = next(_numbers)
        self.names: Names = {}
        self.ledger: Any = make_ledger([], (), None)
        self.layouts: tuple[ShardLayout, ...] = ()
        # ``_answered`` is the value that ``backwards`` had at the optimizer's last unscaling or step.
        self.backwards = self._answered = 0
        self._sharers: list[OptimizerState] = []  # states of other optimizers that share parameters
        self.result: StepResult | None = None
        # The stage that was set most recently, and the number of updates that had been requested by then.
        self._used = (OptState.READY, 0)
        self.forget()

    def forget(self) -> None:
        """Forget the norm and all overflows, because the optimizer has stepped."""
        self.norm: Tensor | None = None
        self.norm_type, self._norm_at = 2.0, 0
        self.found_inf_per_device: dict[Any, Tensor] = {}
        self.measurements: list[Measurement] = []
        self._loss_scales: dict[LossScale, None] = {}  # the loss scales applied to losses
        # One tuple for each group of rescaled gradients, with their previous loss scale and overflow flag.
        self.contributions: list[tuple[LossScale, Tensor]] = []

    @property
    def optimizer(self) -> Any:
        """The optimizer. The ScalerCore drops this state when the optimizer is deleted."""
        return self._optimizer()

    @property
    def params(self) -> list[Tensor]:
        """The optimizer's parameters, as they were last read."""
        return self.ledger.params  # type: ignore[no-any-return]

    @property
    def spans_ranks(self) -> bool:
        """Whether several ranks decide together whether to skip a step."""
        return bool(self.shared.ranks or self.layouts)

    @property
    def stage(self) -> OptState:
        """The stage in torch's terms: READY, UNSCALED or STEPPED. An update makes it READY."""
        stage, updates = self._used
        return stage if updates == self.shared.updates else OptState.READY

    @property
    def is_awaited(self) -> bool:
        """Whether a scaled backward pass has begun since the last step or ``unscale_`` of the optimizer."""
        return self.backwards > self._answered

    def _use(self, stage: OptState, *, answers: bool = True) -> None:
        """Record that the optimizer has unscaled its gradients or has stepped."""
        self._used = (stage, self.shared.updates)
        if answers:
            self._answered = self.backwards

    def take_params(self, params: list[Tensor], others: list[OptimizerState], last: LossScale | None) -> None:
        """Set the parameters of the optimizer.

        Args:
            params: The parameters.
            others: The states of all optimizers of the scaler. The new ledger reuses the records of
                parameters that optimizers share.
            last: The loss scale of the last scaled backward pass; None if there was none. Gradients of new
                parameters are assumed to have been multiplied by this loss scale. If ``last`` is None, the
                gradients are assumed to have been multiplied by the default loss scale, as in torch.amp.
        """
        mine = {id(param) for param in self.params}
        new = [param for param in params if id(param) not in mine]
        for other in others if new else ():
            self.hear(other.measurements if other is not self else (), new)
        if last is not None and any(param.grad is not None for param in new):
            self.backwards += 1  # that pass may have made their gradients
        scale = (last or self.shared.default) if self.shared.enabled else None
        self.ledger = make_ledger(params, [state.ledger for state in others], scale)
        self.layouts = parameter_layouts(params)

    def share(self, others: list[OptimizerState]) -> None:
        """Record which other optimizers share parameters with this optimizer."""
        mine = {id(param) for param in self.params}
        self._sharers = [o for o in others if o is not self and not mine.isdisjoint(map(id, o.params))]

    def hear(self, measurements: Iterable[Measurement], params: list[Tensor]) -> None:
        """Add overflows that another optimizer has found in shared parameters, so that both skip the step."""
        for found in (part for kept in measurements for part in kept.of(params)):
            self.measurements.append(found)
            self._find(found.found_inf)

    def parts(self) -> list[tuple[LossScale | None, list[Tensor], bool]]:
        """Return the parameters grouped by loss scale.

        A loss scale that has not been used to scale a loss is replaced by None.
        """
        return [
            (None if scale is None or scale.value is None else scale, params, changed)
            for scale, params, changed in self.ledger.parts()
        ]

    def scales_carried(self) -> set[LossScale | None]:
        """Return the loss scales by which gradients are multiplied; None stands for unscaled gradients."""
        return {scale for scale, _, _ in self.parts()}

    def delays_update(self, *, is_alone: bool) -> bool:
        """Return whether this optimizer must step before the loss scale changes. All ranks return the same.

        If there are several optimizers, one whose gradients were unscaled must still step. Otherwise, the
        loss scale would change twice if all of them are clipped before the first one steps.
        """
        if not is_alone and self._used[0] is OptState.UNSCALED:
            return True
        return self.is_awaited if self.spans_ranks else bool(self.ledger.waits())

    def parameter_names(self) -> list[str]:
        """Return the name of each parameter."""
        return names_of(self.params, self._optimizer(), self.names)

    def add_names(self, named: Mapping[str, Tensor]) -> None:
        """Add names of parameters."""
        self.names.update((id(param), (param, name)) for name, param in named.items())

    def name_of(self, param: Tensor) -> str:
        """Return a parameter's name for an error. An unnamed parameter is searched for in all modules."""
        paths = {id(own): (own, path) for path, own in module_paths([param]).items()}
        names = names_of(self.params, self._optimizer(), paths | self.names)
        return names[next(i for i, own in enumerate(self.params) if own is param)]

    def begin_call(self) -> None:
        """Treat gradients as scaled whenever torch.amp would, even if no scaled backward pass was seen.

        Our hooks do not see compiled backward passes, replayed CUDA graphs, or losses multiplied by
        ``get_scale()``. After ``step()`` and ``update()``, all gradients are treated as scaled, because
        writes through ``.data``, NumPy or a collective do not change the version counter. After ``unscale_``
        and ``update()`` without a step, a gradient is treated as scaled only if its address has changed.
        """
        default, used, now = self.shared.default, self._used[1], self.shared.updates
        if default.value is None or not self.shared.enabled or used == now:
            return
        if self.ledger.assume_scaled(default, self._number, _WRITTEN if used == _WRITTEN else now):
            self._refuse_strays()
            self.forget_overflows()  # they belong to an earlier batch

    def _refuse_strays(self) -> None:
        """Under Lightning and Accelerate, raise if gradients come from a loss that was not scaled."""
        if not self.shared.scales_all or self.is_awaited or not self.ledger.waits():
            return
        named = [
            name
            for name, param in zip(self.parameter_names(), self.params, strict=True)
            if param.grad is not None and measured([param], None)[0].norm.item() != 0
        ]
        # Gradients that zero_grad(set_to_none=False) has filled with zeros cause no error.
        if named:
            kind, backward = type(self.optimizer).__name__, self.shared.words.backward
            some = ", ".join(named[:3])
            raise RuntimeError(_STRAYS.format(kind=kind, count=len(named), some=some, backward=backward))

    def begin_backward(self, scale: LossScale) -> None:
        """Rescale existing gradients to ``scale``, the loss scale of a backward pass that is about to run."""
        if self.ledger.has_gradients():
            self._forget_if_zero()
        else:
            self.forget_overflows()
            if not self.spans_ranks:  # other ranks may still have gradients
                self.contributions = []
        if self._used[1] == _WRITTEN:
            self.ledger.assume_scaled(self.shared.default, self._number, _WRITTEN)
        was_awaited = self.is_awaited
        self.backwards += 1
        for before, params, changed in self.parts():
            if before is scale:
                continue
            factor = scale.require() if before is None else scale.require() / before.require()
            found = measured(params, factor, math.inf, write=True)
            if before is not None:
                now = found if changed else []
                self.contribute(before, now, was_awaited=was_awaited)
                here = {id(param) for param in params} if self._sharers else set()
                for other in self._sharers:
                    if not here.isdisjoint(map(id, other.params)):
                        shared = [part for kept in now for part in kept.of(other.params)]
                        other.contribute(before, shared, was_awaited=was_awaited)
        self.ledger.begin_backward(scale)

    def contribute(self, scale: LossScale, found: list[Measurement], *, was_awaited: bool) -> None:
        """Record the previous loss scale of gradients that were rescaled, and the overflows found in them.

        All ranks record the same loss scales. The next measurement tells all ranks whether there was an
        overflow.
        """
        overflows = [measurement.found_inf for measurement in found]
        if self.spans_ranks:
            overflows = [torch.zeros_like(scale.require())] * was_awaited
        self.contributions += [(scale, overflow) for overflow in overflows]

    def _forget_if_zero(self) -> None:
        """Forget the overflows of gradients that ``zero_grad()`` has since set to zero."""
        if self.measurements:
            self.measurements = forgotten_if_zero(self.measurements)
            self.found_inf_per_device = {}
            for found in self.measurements:
                self._find(found.found_inf)

    def forget_overflows(self) -> None:
        """Forget the overflows found so far, as torch.amp does in ``update()``."""
        self.measurements, self.found_inf_per_device = [], {}

    def _find(self, found_inf: Tensor) -> None:
        """Remember whether an overflow was found."""
        before = self.found_inf_per_device.get(found_inf.device)
        found = found_inf if before is None else torch.maximum(before, found_inf)
        self.found_inf_per_device[found_inf.device] = found

    def forget_stale_norm(self) -> None:
        """Without loss scaling, forget the stored norm if a gradient has changed since the norm was measured.

        If gradients are clipped several times before a step, the norm from before the first clip is kept.
        If loss scaling is on, this method does nothing, because hooks record each backward pass.
        """
        if not self.shared.enabled and self.ledger.is_changed():
            self.norm = None

    def replace_norm(self, norm: Tensor | None) -> None:
        """Replace the stored gradient norm with a norm that the caller has measured."""
        self.norm = norm

    def take_norm(self, norm: Tensor, norm_type: float) -> None:
        """Store a gradient norm, unless the norm from before clipping is already stored."""
        if self.norm is None:
            self.norm, self.norm_type, self._norm_at = norm, norm_type, self.backwards

    def measure(
        self, *, unscale: bool, norm_type: float = 2.0, on_request: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Measure the norm of the gradients over all ranks, and record whether there is an overflow.

        Args:
            unscale: True also unscales the gradients in place.
            norm_type: The p of the p-norm.
            on_request: True if the user has called ``unscale_``.

        Returns:
            Two tensors (float32, 0-dim). The first tensor is the norm of the unscaled gradients. The second
            tensor is 1.0 if any gradient has been inf or nan since the last step, else 0.0.
        """
        if self.norm is not None and self.backwards > self._norm_at and self.ledger.has_grown():
            self.norm = None  # it was the norm of fewer micro-batches
        found_now = self._measured_now(norm_type, unscale=unscale, on_request=on_request)
        self._forget_earlier()
        earlier = list(self.found_inf_per_device.values())
        ranks, device = self.shared.ranks, self.shared.device_for(self.params)
        norm, found = ranks.combine(found_now, norm_type, device, self.layouts, earlier)
        for other in self._sharers:
            other.hear(found_now, other.params)
        self.measurements += found_now
        if len(self.measurements) > _MOST_KEPT:
            self.measurements = joined(self.measurements)
        if found_now:
            self.take_norm(norm, norm_type)
            self.found_inf_per_device = {found.device: found}
        self._record(found, earlier, counts=bool(found_now) or self.spans_ranks)
        self.shared.note_check()
        return norm, found

    def _measured_now(self, norm_type: float, *, unscale: bool, on_request: bool) -> list[Measurement]:
        parts, found_now = self.parts(), list[Measurement]()
        for scale, params, _ in parts if unscale else ():
            self._refuse_float16(scale, params)
        for scale, params, _ in parts:
            found = measured(params, scale, norm_type, write=unscale and scale is not None)
            if scale is not None and (found or self.spans_ranks):
                self._loss_scales[scale] = None
            found_now += found
        if unscale:
            user = self._number if on_request else 0
            self.ledger.carry_nothing(user, self.shared.updates, False)
        return found_now

    def _forget_earlier(self) -> None:
        """Forget overflows that were found earlier, if they cannot belong to the current batch."""
        if not self.shared.enabled:
            # An overflow of a discarded batch must not count as an overflow of the current batch.
            self.forget_overflows()
        elif self.stage is OptState.READY:
            self._forget_if_zero()  # an update came after those overflows

    def _record(self, found: Tensor, earlier: list[Tensor], *, counts: bool) -> None:
        """Record the overflow flag for the loss scale of every loss that contributed to the gradients."""
        for loss_scale in self._loss_scales if counts else ():
            loss_scale.record(found, includes=earlier)
        for loss_scale, overflow in self.contributions:
            loss_scale.record(found if self.spans_ranks else overflow)
        self.contributions = []

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
        """Unscale the gradients that are still scaled. Compute the norm and overflow flag of all gradients.

        Args:
            norm_type: The p of the p-norm.
            on_request: True if the user has called ``unscale_``, which is allowed once before each update.
                False if clipping calls this method.

        Returns:
            The norm and found_inf, as in :meth:`measure`.
        """
        self.begin_call()
        found = self.measure(unscale=True, norm_type=norm_type, on_request=on_request)
        self._use(OptState.UNSCALED, answers=on_request)
        return found

    def unscale_by(self, unscale: Callable[[Tensor], dict[Any, Tensor]]) -> None:
        """Unscale the gradients with a program's own ``_unscale_grads_``, and keep the flags it returns.

        Args:
            unscale: A function that takes the loss scale (float32, 0-dim) and returns a dict that maps each
                device to its overflow flag, which is 1.0 for an overflow, else 0.0.
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
                    self.shared.note_check()
        self._use_as(OptState.UNSCALED)

    def write_stage(self, stage: OptState) -> None:
        """Set the optimizer's stage to the value that a program wrote into ``_per_optimizer_states``.

        If the stage is UNSCALED or STEPPED, the gradients are treated as unscaled. If the stage is READY,
        gradients that were already unscaled or used in a step are assumed to be multiplied by the default
        loss scale. The stage READY takes effect when the optimizer next uses the gradients, or when a scaled
        backward pass begins.
        """
        if stage is OptState.READY:
            if self.stage is OptState.UNSCALED and not self.is_awaited:
                self.ledger.carry_nothing(self._number, self.shared.updates, True)
                self._answered, self.norm = self.backwards - 1, None  # they await a step
            self._used = (stage, _WRITTEN)
            return
        for scale, params, _ in self.parts():
            if scale is not None and any(param.grad is not None for param in params):
                self._loss_scales[scale] = None
        self._use_as(stage)

    def write_found(self, found_inf_per_device: dict[Any, Tensor]) -> None:
        """Replace the overflow flags with those that a program wrote into ``_per_optimizer_states``."""
        self.forget_overflows()
        self.found_inf_per_device = found_inf_per_device

    def switch(self, enabled: bool) -> None:
        """Switch loss scaling on or off. While loss scaling is off, gradients count as unscaled."""
        if not enabled:
            self.ledger.carry_nothing(0, self.shared.updates, False)
            self._answered = self.backwards
        elif self.stage is OptState.STEPPED:
            # While loss scaling was off, the optimizer may have stepped without an update.
            self.write_stage(OptState.READY)

    def _use_as(self, stage: OptState) -> None:
        """Record that all gradients are unscaled, or that the optimizer has stepped with them."""
        is_step = stage is OptState.STEPPED
        self.ledger.carry_nothing(self._number, self.shared.updates, is_step)
        self._use(stage)

    def overflowed_before_closure(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients, if the optimizer may use them before it calls its closure.

        Returns:
            True if the gradients were unscaled and one of them is not finite. The host waits for the device.
        """
        left = uses_gradients_before_closure(optimizer) and self.is_awaited and self.ledger.has_gradients()
        return left and bool(self.unscale_()[1].item() > 0)

    def judge(
        self, norm: Tensor, found_inf: Tensor, *, in_place: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Judge whether the step is a spike.

        Args:
            norm: The norm that :meth:`measure` returned.
            found_inf: The flag that it returned.
            in_place: True to clip the gradients in this method if the step is a spike.

        Returns:
            Four values. The first value is the norm of the gradients that the step uses. The second value
            (float32, 0-dim) is 1.0 if the step must be skipped. The third value is the factor by which the
            caller must multiply the gradients; None means 1. The fourth value is the result of
            ``judge_step_``; None if the step was not judged.
        """
        before, spikes = norm if self.norm is None else self.norm, self.shared.spikes
        trackers = [scale.growth_tracker for scale in self._loss_scales]
        backward = self.shared.words.backward
        judged = spikes.judge(self.optimizer, (before, norm), found_inf, trackers, backward)
        found_inf = found_inf if judged is None else judged[0]
        self.found_inf_per_device = {found_inf.device: found_inf}  # a program's own step function reads it
        if judged is None or not spikes.clips:
            return norm, found_inf, None, judged
        if in_place:
            self.ledger.write(partial(multiply_, self.params, judged[1]))
        return judged[5], found_inf, None if in_place else judged[1], judged

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step without letting our hook refuse it."""
        with own_step(self.optimizer):
            return step(*args, **kwargs)

    def refuse_step_past_scaler(self) -> None:
        """Raise if ``optimizer.step()`` bypasses the scaler while a gradient is scaled, inf or nan.

        The host waits for the device only if the gradients have already been unscaled.
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
        """Return whether a gradient that has overflowed since the last step is still inf or nan.

        Host sync.
        """
        found = self.found_inf_per_device.values()
        return (
            not any(capturing(flag.device) for flag in found)
            and any(flag.item() > 0 for flag in found)
            and any(part.found_inf.item() > 0 for part in measured(self.params, None))
        )

    def close(
        self,
        norm: Tensor,
        found_inf: Tensor,
        judged: Tensor | None,
        *,
        known: bool | None,
        how: str,
        one_pass: bool = False,
        max_norm: float | None = None,
    ) -> StepResult:
        """Record that a step was taken or skipped, and return its result."""
        scale = next(iter(self._loss_scales), self.shared.default)
        seen, found = self.norm is not None, self.measurements
        result = StepResult(
            norm=self.norm,
            used_norm=norm if seen else None,
            max_norm=max_norm if seen else None,
            found_inf=found_inf,
            judged=judged,
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
        """Record the result of a step, and return it."""
        self.result = result
        self._use_as(OptState.STEPPED)
        self.forget()
        return result


def uses_gradients_before_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer may use gradients before it calls its closure, as SAM does."""
    return not type(optimizer).__module__.startswith("torch.optim")
