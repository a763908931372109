"""The optimizer step, with a loss scale and without: a scale of None divides by nothing.

::

    measure      norm and found_inf of the gradients, one read
    combine      both, over all ranks
    clip factor  of a clip that was left to the step
    take         one pass | fused | plain, unless found_inf; the host waits for it in a plain step only
    close        .grad is unscaled and clipped, the step taken or skipped; its result goes to the log

A step in one pass and torch's fused kernels divide the gradients as they read them. Before any other step
the gradients are unscaled and clipped in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.scaling import closures, one_pass
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.one_pass import OnePassStep
from amp_plugin.scaling.per_optimizer import PerOptimizerState
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.step_log import HostFlag, StepLog, StepResult


class Steps:
    """Takes the steps of a scaler's optimizers, and hands each to the log."""

    def __init__(self, registry: Registry, log: StepLog) -> None:
        self.registry, self.shared, self.log = registry, registry.shared, log

    def step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Step as :meth:`amp_plugin.GradScaler.step` does."""
        scales = self.shared.scales
        if not (scales.enabled or self.shared.checks):
            value = optimizer.step(*args, **kwargs)
            self.note(self.registry.state(optimizer), "on_nonfinite='ignore' takes torch's own step")
            return value
        closure, args, kwargs = take_closure(args, kwargs)
        if closure is None and scales.enabled:
            scales.require("step")
        state = self.registry.state(optimizer)
        state.obstacle = self.why_not_one_pass(state, optimizer, has_arguments=bool(args or kwargs))
        call = partial(state.step_by, optimizer, *args, **kwargs)
        if scales.enabled and self.registry.is_step_refused(state, repeats=closure is not None):
            msg = (
                "step() has already been called since the last update(). Call update() once per iteration, "
                "or make the scaler with dynamic=False; if another optimizer has yet to step in this "
                "iteration, register() both before the first."
            )
            raise RuntimeError(msg)
        if closure is None:
            value, result = self._once(state, optimizer, call)
        elif state.obstacle:

            def checked(run: Callable[[], Any]) -> Any:
                return state.step_by(optimizer, run, *args, **kwargs)

            value, result = closures.step(state, optimizer, closure, checked)
        else:  # torch's own steps of these optimizers begin with the closure
            value = closures.run(state, closure)
            if scales.enabled:
                scales.require("step")
            _, result = self._once(state, optimizer, call)
            value = None if scales.enabled and result.skipped_if_known() else value
        self.log.add(state.optimizer, result)
        return value

    def why_not_one_pass(self, state: PerOptimizerState, optimizer: Optimizer, *, has_arguments: bool) -> str:
        """Return why a step cannot be taken in one pass, whatever the gradients; empty if it can."""
        if has_arguments:
            return "step() was given arguments"
        if not self.shared.one_pass:
            return "one_pass=False"
        scale_is_on = self.shared.scales.device
        if scale_is_on is not None and any(param.device != scale_is_on for param in state.params[:1]):
            return f"the loss scale is on {scale_is_on}"
        return one_pass.why_not(optimizer)

    def note(self, state: PerOptimizerState, obstacle: str) -> StepResult:
        """Record a step that was taken without a look at its gradients, and return its result."""
        state.obstacle = obstacle
        result = state.close(StepResult.unscaled(state.norm, obstacle=obstacle))
        self.log.add(state.optimizer, result)
        return result

    def _once(
        self, state: PerOptimizerState, optimizer: Optimizer, call: Callable[[], Any]
    ) -> tuple[Any, StepResult]:
        """Step by the gradients that are there."""
        state.begin_call()
        state.refuse_taken_away()
        scaled, left = self.shared.scales.enabled, may_be_left_to_kernel(state)
        tensors = self._collected(state, optimizer, left=left)
        left = left and (tensors is not None or is_fused(optimizer))
        state.refuse_changed_after_clip()
        norm_type = state.norm_type if state.folded_clip is None else state.folded_clip.norm_type
        if not left:
            state.remeasure_clip()  # of what the gradients are now; measure() writes it
        suspect = state.clip_suspect()
        norm, found = state.measure(unscale=not left, norm_type=norm_type)
        if suspect is not None:
            is_one = state.scaled_clip.found(norm, suspect.require())
            self.log.when_known(is_one, state.refuse_scaled_clip)
        divisor = _divisor(state, norm, found) if left else None
        value: Any = None
        skipped = HostFlag.at_once(found)
        if tensors is not None:
            tensors.take(_times_given(divisor, optimizer), found, skipped=skipped)
        elif is_fused(optimizer) and (scaled or divisor is not None or skipped is None):
            with _kernel_reads(optimizer, _times_given(divisor, optimizer), found, keeps=not scaled):
                value, skipped = _take_fused(state, optimizer, found, call)
            if divisor is not None and skipped is not False:
                state.multiply_(torch.where(found > 0, divisor.reciprocal(), 1.0))  # it has not divided
        else:
            value, skipped = _take_plain(optimizer, found, call)
        for gradients in state.groups:
            gradients.unit = None
        return value, state.close(state.result_of_step(norm, found, known=skipped))

    def _collected(self, state: PerOptimizerState, optimizer: Optimizer, *, left: bool) -> OnePassStep | None:
        """Return a step in one pass, ready to be taken; None with the reason in ``state.obstacle``."""
        state.obstacle = state.obstacle or self._obstacle_in_gradients(state, optimizer, left=left)
        tensors = state.obstacle or one_pass.collect(optimizer)
        if isinstance(tensors, str):
            state.obstacle = tensors
            return None
        return tensors

    def _obstacle_in_gradients(self, state: PerOptimizerState, optimizer: Optimizer, *, left: bool) -> str:
        on_host = all(param.is_cpu for param in state.params[:1])
        if left and state.scales_carried() != {None}:
            return ""
        if not self.shared.scales.enabled:
            written = state.folded_clip is None and is_fused(optimizer) and not on_host
            return "on a GPU torch's fused step reads and writes as little" if written else ""
        # After unscale_ torch's own step runs, whose bits users may compare.
        if state.has_written_clip and on_host and not state.is_shared and state.scales_carried() == {None}:
            return ""
        return "its gradients are unscaled already, shared, or of several scales"


def take_closure(args: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any] | None, Any, dict[str, Any]]:
    """Return the closure among the arguments of ``step``, by keyword or by position."""
    if callable(kwargs.get("closure")):
        rest = dict(kwargs)
        return rest.pop("closure"), args, rest
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own step divides by a scale and skips by itself."""
    kind: Any = type(optimizer)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not _takes_scaler(kind)


@cache
def _takes_scaler(kind: type[Optimizer]) -> bool:
    """Whether ``step`` follows the contract before ``grad_scale`` and ``found_inf``: it wants the scaler."""
    return hasattr(kind, "step") and "grad_scaler" in inspect.signature(kind.step).parameters


def may_be_left_to_kernel(state: PerOptimizerState) -> bool:
    """Whether the step's kernel may divide the gradients: all by one number, and nobody looks before."""
    if state.is_shared or len(state.scales_carried()) > 1:
        return False
    hooks = one_pass.pre_hooks(state.optimizer)
    return all(getattr(hook, "leaves_gradients", False) for hook in hooks)


def _divisor(state: PerOptimizerState, norm: Tensor, found: Tensor) -> Tensor | None:
    """Return what the kernel divides by: scale and clipping; None for 1."""
    loss_scale = next(iter(state.scales_carried()), None)
    scale = None if loss_scale is None else loss_scale.require()
    clip = None if state.folded_clip is None else state.remeasure_clip((norm, found))
    return scale if clip is None else clip.factor(torch.ones_like(norm) if scale is None else scale)


def _times_given(divisor: Tensor | None, optimizer: Optimizer) -> Tensor | None:
    """Return a divisor times the one that the optimizer's user has set, which fused optimizers read."""
    given: Tensor | None = getattr(optimizer, "grad_scale", None) if is_fused(optimizer) else None
    return divisor if given is None else given if divisor is None else divisor * given


def _take_fused(
    state: PerOptimizerState, optimizer: Optimizer, found: Tensor, call: Callable[[], Any]
) -> tuple[Any, bool | None]:
    """Let torch's kernel divide and skip."""
    known = HostFlag.at_once(found)
    if not state.has_momentum:
        without = _without_momentum(optimizer)
        state.has_momentum = not without
        if any(param.grad is not None for param in without) and found.item() > 0:
            return None, True
    match_memory_order(optimizer)
    return call(), known


def _take_plain(optimizer: Optimizer, found: Tensor, call: Callable[[], Any]) -> tuple[Any, bool]:
    """Step unless the host finds that it is to be skipped."""
    captured = capturing(found.device)
    if captured:
        warn_user(
            f"a step of {type(optimizer).__name__} is captured in a CUDA graph: its replays do not skip "
            "gradients that are not finite. Use fused=True, or capturable=True with Adam or AdamW."
        )
    skipped = not captured and bool(found.item() > 0)
    match_memory_order(optimizer)  # fused, and yet without AMP support: Adagrad in torch 2.11
    return (None if skipped else call()), skipped


@contextmanager
def _kernel_reads(optimizer: Any, divisor: Tensor | None, found: Tensor, *, keeps: bool) -> Iterator[None]:
    """Set what the optimizer's kernel reads; ``keeps`` puts back what its user has set there."""
    own = {name: getattr(optimizer, name) for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)}
    # For parameters on the host it must have arrived there: torch itself would copy without waiting.
    if not found.is_cpu and any(param.is_cpu for param in params_of(optimizer)):
        divisor, found = None if divisor is None else divisor.cpu(), found.cpu()
    optimizer.grad_scale, optimizer.found_inf = divisor, found
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        for name, value in own.items() if keeps else ():
            setattr(optimizer, name, value)


def _without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose momentum buffer SGD's kernel would leave uninitialised if it skips."""
    return [
        param
        for group in (optimizer.param_groups if isinstance(optimizer, SGD) else ())
        for param in group["params"]
        if group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
