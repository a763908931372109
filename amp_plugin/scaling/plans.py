"""The three ways to take an optimizer step, and the choice among them.

========= ============================================ ======================= ======= ===================
plan      who divides the gradients by scale and clip  who skips               syncs   when
========= ============================================ ======================= ======= ===================
`OnePass` our kernel, which steps and writes ``.grad`` our kernel              none    we have its rule
`Fused`   they are divided in place before             torch's fused kernel    none    ``fused=True``
`Fused`   the optimizer itself, by the scaler          the optimizer itself    its own ``grad_scaler=``
`Plain`   they are divided in place before             the host                one     any other optimizer
========= ============================================ ======================= ======= ===================

A sync means that the host waits for the device. On CPUs and GPUs alike, `OnePass` is preferred if a kernel
can step the optimizer in one pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.weights import one_pass
from amp_plugin.weights.one_pass import OnePassStep

Call = Callable[[], Any]
Taken = tuple[Any, bool | None]
"""The result of a step, and whether it was skipped; None if only the device knows."""


@dataclass(frozen=True)
class OnePass:
    """One kernel divides, clips and stores the gradients, and steps unless the overflow flag is 1."""

    _step: OnePassStep

    how = "in one pass"
    divides = True

    def take(self, state: OptimizerState, call: Call, found: Tensor, divisor: Tensor | None) -> Taken:
        """Step unless ``found`` is 1.

        Args:
            state: The state of the optimizer.
            call: Calls the optimizer's own step.
            found: 1.0 if the step must be skipped, else 0.0 (float32, 0-dim).
            divisor: The number by which the kernel divides the gradients (float32, 0-dim); None means 1.

        Returns:
            The result of the optimizer's step, and whether it was skipped. The second value is None if only
            the device knows whether the step was skipped.
        """
        del call
        optimizer: Any = state.optimizer
        given: Tensor | None = getattr(optimizer, "grad_scale", None) if is_fused(optimizer) else None
        skipped = StepResult.known_at_once(found)
        both = divisor if given is None else given if divisor is None else divisor * given
        self._step.take(both, found, skipped=skipped)
        return None, skipped


@dataclass(frozen=True)
class Fused:
    """The optimizer's own step, which has no effect if a gradient is inf or nan.

    The step is either torch's fused kernel, after gradients were unscaled and clipped in place, or a step
    with the argument ``grad_scaler=``, which unscales the gradients too.
    """

    how: str  # for people
    divides: bool  # True if ``step`` takes ``grad_scaler=`` and unscales the gradients itself

    def take(self, state: OptimizerState, call: Call, found: Tensor, divisor: Tensor | None) -> Taken:
        """Step as :meth:`OnePass.take` does. The divisor is not used."""
        del divisor
        optimizer, skipped = state.optimizer, StepResult.known_at_once(found)
        if self.divides:
            return call(), skipped
        if skipped is not None and not state.shared.enabled:
            # This step on the CPU is bitwise equal to torch's step without a scaler.
            return _take_unless(found, optimizer, call)
        if any(param.grad is not None for param in _without_momentum(optimizer)) and found.item() > 0:
            return None, True
        with _kernel_reads(optimizer, found):
            return call(), skipped


@dataclass(frozen=True)
class Plain:
    """The optimizer's own step after gradients were unscaled and clipped in place.

    The host waits for found_inf.
    """

    how: str  # for people

    divides = False

    def take(self, state: OptimizerState, call: Call, found: Tensor, divisor: Tensor | None) -> Taken:
        """Step as :meth:`OnePass.take` does. The divisor is not used."""
        del divisor
        return _take_unless(found, state.optimizer, call)


Plan = OnePass | Fused | Plain


def choose(optimizer: Optimizer, why_not: str, *, scales: bool) -> Plan:
    """Choose how to step with the current gradients.

    Args:
        optimizer: The optimizer, or an optimizer that wraps it.
        why_not: The reason why this optimizer can never step in one pass; an empty string if it can.
        scales: True if losses are scaled.
    """
    if not why_not:
        try:
            return OnePass(one_pass.collect(optimizer))
        except ValueError as reason:
            why_not = str(reason)
    if scales and takes_scaler(optimizer):
        return Fused("the optimizer's own step, which asked for the scaler", divides=True)
    if is_fused(optimizer):
        return Fused(f"torch's fused step ({why_not})", divides=False)
    return Plain(f"the optimizer's own step ({why_not})")


def why_not_one_pass(state: OptimizerState, optimizer: Optimizer, *, has_arguments: bool) -> str:
    """Return the reason why this optimizer can never step in one pass, or an empty string if it can.

    The function does not examine the current gradients. They can still prevent a step in one pass.
    """
    if has_arguments:
        return "step() was given arguments"
    if not state.shared.options.one_pass:
        return "one_pass=False"
    scale_is_on = state.shared.scale_device
    if scale_is_on is not None and any(param.device != scale_is_on for param in state.params[:1]):
        return f"the loss scale is on {scale_is_on}"
    return one_pass.why_not(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own step reads ``grad_scale`` and ``found_inf``, as fused steps do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not takes_scaler(optimizer)


def takes_scaler(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` takes the argument ``grad_scaler=``, as torch still allows."""
    kind: Any = type(optimizer)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _has_grad_scaler(kind)


@cache
def _has_grad_scaler(kind: Any) -> bool:
    return hasattr(kind, "step") and "grad_scaler" in inspect.signature(kind.step).parameters


def _take_unless(found: Tensor, optimizer: Optimizer, call: Call) -> Taken:
    """Wait for the flag ``found``, and step unless it is 1."""
    captured = capturing(found.device)
    if captured:
        warn_user(
            f"a step of {type(optimizer).__name__} is captured in a CUDA graph: its replays do not skip "
            "gradients that are not finite. Use fused=True, or capturable=True with Adam or AdamW."
        )
    skipped = not captured and bool(found.item() > 0)
    return (None if skipped else call()), skipped


@contextmanager
def _kernel_reads(optimizer: Any, found: Tensor) -> Iterator[None]:
    """Set the ``found_inf`` that a fused optimizer reads, and restore the old value after the block."""
    # CPU parameters need found_inf on the CPU.
    # torch would copy found_inf asynchronously, and might read it before the copy is complete.
    on_host = not found.is_cpu and any(param.is_cpu for param in params_of(optimizer))
    own = {name: getattr(optimizer, name) for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)}
    optimizer.grad_scale, optimizer.found_inf = own.get("grad_scale"), found.cpu() if on_host else found
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        for name, value in own.items():
            setattr(optimizer, name, value)


def _without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return parameters whose momentum buffer would stay uninitialised if a fused SGD step were skipped."""
    return [
        param
        for group in (optimizer.param_groups if isinstance(optimizer, SGD) else ())
        for param in group["params"]
        if group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
