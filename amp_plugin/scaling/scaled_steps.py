"""Unscale, clip and step an optimizer whose gradients carry a loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling import clipping, closures, fused, plain
from amp_plugin.scaling.clipping import NormClip, Target
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.scaling.updates import Updates


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledSteps:
    """What a GradScaler does between backward and update; ``GuardedSteps`` does it without a loss scale.

    Attributes:
        shared: What the windows share.
        registry: The windows of the optimizers.
        updates: Counts each step.
        sync_free: Whether optimizers without AMP support skip on the device.
    """

    shared: Shared
    registry: Registry
    updates: Updates
    sync_free: bool

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale as :meth:`amp_plugin.GradScaler.unscale_` tells."""
        window = self._open_window("unscale_", optimizer)
        if window.stage is OptState.UNSCALED and not window.is_awaited():
            msg = (
                "unscale_() has already been called on this optimizer since the last update(). "
                "Call it once, or use ensure_unscaled(), which may be repeated."
            )
            raise RuntimeError(msg)
        if window.stage is OptState.STEPPED and not window.is_awaited():
            msg = "unscale_() is being called after step(). Call it between backward() and step()."
            raise RuntimeError(msg)
        window.unscale_()
        window.note_unscaled()

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Unscale as :meth:`amp_plugin.GradScaler.ensure_unscaled` tells."""
        window = self._open_window("ensure_unscaled", optimizer)
        window.unscale_()
        window.note_unscaled()

    def _open_window(self, call: str, optimizer: Optimizer) -> OptimizerWindow:
        self.shared.scales.require(call)
        window = self.registry.window(optimizer)
        window.begin_call()
        return window

    def clip_norm(self, target: Target, clip: NormClip) -> Tensor:
        """Clip as :meth:`amp_plugin.GradScaler.clip_grad_norm_` tells."""
        return clipping.clip_norm(self.registry, self.shared, target, clip)

    def clip_value(self, target: Target, limit: float) -> None:
        """Clip as :meth:`amp_plugin.GradScaler.clip_grad_value_` tells."""
        clipping.clip_value(self.registry, target, limit)

    def assume_unchanged(self, optimizer: Optimizer) -> None:
        """Trust what was measured for one more call."""
        self.registry.window(optimizer).assume_unchanged()

    def step(
        self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any], scaler: object
    ) -> tuple[Any, StepResult | None]:
        """Step as :meth:`amp_plugin.GradScaler.step` tells; ``scaler`` is for optimizers that take it."""
        closure, args, kwargs = closures.take_closure(args, kwargs)
        if closure is None:
            self.shared.scales.require("step")
        window = self.registry.window(optimizer)
        if closure is None:
            value = self._step_once(window, optimizer, args, kwargs, scaler)
        else:
            value = closures.step(window, optimizer, closure, args, kwargs)
        if window.result is not None:
            self.updates.note_step(window, window.result)
        return value, window.result

    def _step_once(
        self, window: OptimizerWindow, optimizer: Optimizer, args: Any, kwargs: dict[str, Any], scaler: object
    ) -> Any:
        if window.stage is OptState.STEPPED and not window.is_awaited():
            msg = "step() has already been called since the last update(). Run backward() or update() first."
            raise RuntimeError(msg)
        window.begin_call()
        window.refuse_taken_away()
        window.assume_scaled()
        one_pass = fused.in_one_pass(window, optimizer, args, kwargs)
        if one_pass is not None:
            waits = not (self.sync_free or fused.is_fused(optimizer))
            return fused.step_in_one_pass(window, optimizer, one_pass, waits=waits)
        if not fused.is_fused(optimizer):
            return plain.step(window, optimizer, args, kwargs, without_sync=self.sync_free)
        if window.takes_scaler is None:
            window.takes_scaler = fused.takes_scaler(optimizer)
        if window.takes_scaler:
            return fused.step_with_scaler(window, optimizer, args, {**kwargs, "grad_scaler": scaler})
        return fused.step(window, optimizer, args, kwargs)
