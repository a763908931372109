"""Clips and steps where nothing is scaled: a step is taken unless a gradient is not finite.

::

    host:    wait for found_inf; step, or do nothing        (on the CPU there is no wait)
    device:  a fused optimizer's kernel skips by found_inf  (no host sync)

A clip that was left to the step is worked in by a step in one pass, and written before any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling import clipping, guarded_closures, guarded_one_pass, sync_free
from amp_plugin.scaling.clipping import NormClip, Target
from amp_plugin.scaling.closures import Closure, take_closure
from amp_plugin.scaling.guard import Check, Guard, given_found_inf, skips_by_itself
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.memory_order import match_memory_order
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.user_warnings import warn_user


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardedSteps:
    """What a GradScaler does between backward and update; ``ScaledSteps`` does it with a loss scale.

    Attributes:
        guard: Looks at the gradients.
        registry: The windows of the optimizers.
    """

    guard: Guard
    registry: Registry

    def unscale_(self, optimizer: Optimizer) -> None:
        """Do nothing: no gradient carries a scale."""

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Write a clip that was left to a step, as :meth:`amp_plugin.GradScaler.ensure_unscaled` tells."""
        window = self.registry.window(optimizer)
        window.unscaled.write_clip_(window.params)

    def clip_norm(self, target: Target, clip: NormClip) -> Tensor:
        """Clip by torch's function, or leave the clip to a step in one pass."""
        if clip.fold and isinstance(target, Optimizer):
            folded = guarded_one_pass.fold_clip(self.guard, self.registry.window(target), clip)
            if folded is not None:
                clip.refuse_nonfinite(folded)
                return folded
        params = clipping.params_in(target)
        self._write_folded_clips()
        norm = torch.nn.utils.clip_grad_norm_(params, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        known = [target] if isinstance(target, Optimizer) else self.registry.optimizers_of_exactly(params)
        for optimizer in known:
            self.registry.window(optimizer).unscaled.note_clip(norm, clip.norm_type)
        return norm

    def clip_value(self, target: Target, limit: float) -> None:
        """Clip by torch's function."""
        self._write_folded_clips()
        clipping.clip_value_of(clipping.params_in(target), limit)

    def _write_folded_clips(self) -> None:
        for window in self.registry:
            if window.unscaled.clip is not None:
                window.unscaled.write_clip_(window.params)

    def assume_unchanged(self, optimizer: Optimizer) -> None:
        """Trust the last clip: the step follows on it."""
        self.registry.window(optimizer).unscaled.assume_unchanged()

    def step(
        self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any], _scaler: object
    ) -> tuple[Any, StepResult | None]:
        """Step as :meth:`amp_plugin.GradScaler.step` tells; of a skipped step, return the closure's loss."""
        window = self.registry.window(optimizer)
        value = _GuardedStep(guard=self.guard, window=window, optimizer=optimizer).take(args, kwargs)
        return value, window.result


@dataclass(frozen=True, kw_only=True, slots=True)
class _GuardedStep:
    """One step of an optimizer, in the way that its gradients and its kind allow."""

    guard: Guard
    window: OptimizerWindow
    optimizer: Optimizer

    def take(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Choose the way to step, and return what ``optimizer.step`` or the closure does."""
        if not self.guard.checks or torch.compiler.is_compiling():
            return self.unchecked(args, kwargs)
        closure, others, named = take_closure(args, kwargs)
        if closure is None:
            return self.once(args, kwargs)
        if others or named or guarded_one_pass.obstacle(self.guard, self.window):
            return self.with_closure(closure, others, named)
        with torch.enable_grad():
            loss = closure()  # what torch's own steps of these optimizers begin with
        self.once((), {})
        return loss

    def unchecked(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Step whatever the gradients are."""
        self.window.obstacle = guarded_one_pass.obstacle(self.guard, self.window)
        value = self.optimizer.step(*args, **kwargs)
        self.guard.note_taken(self.window)
        return value

    def once(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Step by the gradients that are there."""
        is_folded = self.window.unscaled.clip is not None
        look = guarded_one_pass.check if is_folded else Guard.check
        check = look(self.guard, self.window)
        if check.found is not None:
            return self._checked(check, args, kwargs)
        self.window.obstacle = "nothing was to be clipped or checked"
        value = self.optimizer.step(*args, **kwargs)
        self.guard.close(self.window, check, skipped=False)
        return value

    def with_closure(self, closure: Closure, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let the optimizer call its closure; a clip that the closure has left to the step is written."""
        window = self.window

        def clipped() -> Any:
            loss = closure()
            window.unscaled.write_clip_(window.params)
            return loss

        given = "step() was given arguments" if args or kwargs else ""
        window.obstacle = given or guarded_one_pass.obstacle(self.guard, window)
        return guarded_closures.step(self.guard, window, self.optimizer, clipped, args, kwargs)

    def _checked(self, check: Check, args: Any, kwargs: dict[str, Any]) -> Any:
        """Step in one pass where that is possible, else by torch."""
        found: Any = check.found
        one_pass = guarded_one_pass.collect(self.guard, self.window, self.optimizer, args, kwargs)
        if one_pass is not None:
            skipped = bool(found.item() > 0)
            guarded_one_pass.step(self.window, one_pass, skipped=skipped)
            self.guard.close(self.window, check, skipped=skipped)
            return None
        self.window.unscaled.write_clip_(self.window.params)
        return self._by_torch(check, args, kwargs)

    def _by_torch(self, check: Check, args: Any, kwargs: dict[str, Any]) -> Any:
        """Skip on the device where the optimizer can, else by the host."""
        found: Any = check.found
        skipped: bool | None = None
        match_memory_order(self.optimizer)
        captured = capturing(found.device)
        if skips_by_itself(self.optimizer, found):
            with given_found_inf(self.optimizer, found):
                value = self.optimizer.step(*args, **kwargs)
        elif (self.guard.sync_free or captured) and sync_free.possible(self.optimizer, found.device):
            value = sync_free.step(self.optimizer, found, args, kwargs)
        else:
            if captured:
                _warn_of_capture(self.optimizer)
            skipped = not captured and bool(found.item() > 0)
            value = None if skipped else self.optimizer.step(*args, **kwargs)
        self.guard.close(self.window, check, skipped=skipped)
        return value


def _warn_of_capture(optimizer: Optimizer) -> None:
    warn_user(
        f"a step of {type(optimizer).__name__} is captured in a CUDA graph before its state exists: its "
        "replays do not skip gradients that are not finite. Step once before the capture, or use fused=True."
    )
