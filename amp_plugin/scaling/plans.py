"""The four ways to take an optimizer step, and the choice among them.

=========== ============================================ ======================= ======= =================
plan        who divides the gradients by scale and clip  who skips               syncs   when
=========== ============================================ ======================= ======= =================
`OnePass`   our kernel, which steps and writes ``.grad`` our kernel              none    we have its rule
`Fused`     they are divided in place before             torch's fused kernel    none    ``fused=True``
`Informed`  the optimizer itself, by the scaler          the optimizer itself    its own ``grad_scaler=``
`Plain`     they are divided in place before             the host                one     any other one
=========== ============================================ ======================= ======= =================

A sync is a wait of the host for the device. One pass is preferred if there is a rule for the optimizer, on
CPUs and on GPUs.
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


@dataclass(frozen=True)
class OnePass:
    """One kernel divides, clips, checks the flag, steps and writes the gradients."""

    _step: OnePassStep

    def take(self, state: OptimizerState, found: Tensor, divisor: Tensor | None) -> tuple[Any, bool | None]:
        """Step unless ``found`` is 1.

        Args:
            state: The state of the optimizer.
            found: 1.0 if the step must be skipped, else 0.0 (float32, 0-dim).
            divisor: The number by which the kernel divides the gradients (float32, 0-dim); None means 1.

        Returns:
            The result of the optimizer's step, and whether it was skipped. The second is None if only the
            device knows.
        """
        optimizer: Any = state.optimizer
        given: Tensor | None = getattr(optimizer, "grad_scale", None) if is_fused(optimizer) else None
        skipped = StepResult.known_at_once(found)
        both = divisor if given is None else given if divisor is None else divisor * given
        self._step.take(both, found, skipped=skipped)
        return None, skipped

    def __str__(self) -> str:
        """Say how the step is taken."""
        return "in one pass"


@dataclass(frozen=True)
class Fused:
    """torch's fused kernel checks the flag and steps, on gradients unscaled and clipped in place."""

    _call: Call
    _why: str  # not in one pass

    def take(self, state: OptimizerState, found: Tensor, divisor: Tensor | None) -> tuple[Any, bool | None]:
        """Step as :meth:`OnePass.take` does; the gradients were divided before."""
        del divisor
        optimizer, skipped = state.optimizer, StepResult.known_at_once(found)
        if skipped is not None and not state.shared.enabled:
            return _take_unless(found, optimizer, self._call)  # to the bit torch's step without a scaler
        if any(param.grad is not None for param in _without_momentum(optimizer)) and found.item() > 0:
            return None, True
        with _kernel_reads(optimizer, found):
            return self._call(), skipped

    def __str__(self) -> str:
        """Say how the step is taken, and why not in one pass."""
        return f"torch's fused step ({self._why})"


@dataclass(frozen=True)
class Informed:
    """The step of an optimizer that takes the scaler as ``grad_scaler=``, and unscales and skips itself."""

    _call: Call

    def take(self, state: OptimizerState, found: Tensor, divisor: Tensor | None) -> tuple[Any, bool | None]:
        """Step as :meth:`OnePass.take` does, but the optimizer itself handles the gradients."""
        del state, divisor
        return self._call(), StepResult.known_at_once(found)

    def __str__(self) -> str:
        """Say how the step is taken."""
        return "the optimizer's own step, which asked for the scaler"


@dataclass(frozen=True)
class Plain:
    """The optimizer's own step, on gradients unscaled and clipped in place; the host waits for the flag."""

    _call: Call
    _why: str  # not in one pass

    def take(self, state: OptimizerState, found: Tensor, divisor: Tensor | None) -> tuple[Any, bool | None]:
        """As :meth:`Fused.take`."""
        del divisor
        return _take_unless(found, state.optimizer, self._call)

    def __str__(self) -> str:
        """Say how the step is taken, and why not in one pass."""
        return f"the optimizer's own step ({self._why})"


Plan = OnePass | Fused | Informed | Plain


def choose(optimizer: Optimizer, call: Call, why_not: str, *, scales: bool) -> Plan:
    """Choose how to step with the present gradients.

    Args:
        optimizer: The optimizer, or an optimizer that wraps it.
        call: A function that calls the optimizer's own step.
        why_not: Why no step of this optimizer can be taken in one pass, for people; empty if it can.
        scales: True if losses are scaled.
    """
    if not why_not:
        try:
            return OnePass(one_pass.collect(optimizer))
        except ValueError as reason:
            why_not = str(reason)
    if scales and takes_scaler(optimizer):
        return Informed(call)
    return Fused(call, why_not) if is_fused(optimizer) else Plain(call, why_not)


def why_not_one_pass(state: OptimizerState, optimizer: Optimizer, *, has_arguments: bool) -> str:
    """Return why no step can be taken in one pass, whatever its gradients are; empty if steps can."""
    if has_arguments:
        return "step() was given arguments"
    if not state.shared.options.one_pass:
        return "one_pass=False"
    scale_is_on = state.shared.scale_device
    if scale_is_on is not None and any(param.device != scale_is_on for param in state.params[:1]):
        return f"the loss scale is on {scale_is_on}"
    return one_pass.why_not(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own step divides by a scale and skips steps itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not takes_scaler(optimizer)


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether ``step`` takes the scaler itself, as torch's fused steps did before ``grad_scale`` existed."""
    kind: Any = type(optimizer)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _has_grad_scaler(kind)


@cache
def _has_grad_scaler(kind: Any) -> bool:
    return hasattr(kind, "step") and "grad_scaler" in inspect.signature(kind.step).parameters


def _take_unless(found: Tensor, optimizer: Optimizer, call: Call) -> tuple[Any, bool]:
    """Wait for the flag, and step unless it is 1."""
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
    """Set the flag that the optimizer's kernel reads; afterwards restore the user's value."""
    # Parameters on the host need the flag there. Torch itself would copy it without waiting.
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
    """Return the parameters whose momentum buffer SGD's kernel would leave uninitialised if it skips."""
    return [
        param
        for group in (optimizer.param_groups if isinstance(optimizer, SGD) else ())
        for param in group["params"]
        if group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
