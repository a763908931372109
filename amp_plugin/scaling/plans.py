"""The four ways to take an optimizer's step, and which one is chosen.

=========== ============================================= ========= ========= ========================
plan        who divides the gradients by scale and clip   reads     syncs     when
=========== ============================================= ========= ========= ========================
`OnePass`   our kernel, which steps and writes ``.grad``  1         none      there is a rule for it
`Fused`     torch's fused kernel, or in place before      1 or 2    none      ``fused=True``
`Informed`  the optimizer itself, which asks the scaler   its own   its own   ``step(grad_scaler=)``
`Plain`     in place before                               2         one       any other optimizer
=========== ============================================= ========= ========= ========================

Reads are passes over the gradients after they were measured; syncs are waits of the host for the device. One
pass is preferred wherever there is a rule for the optimizer, on a CPU and on a GPU alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.quiet_hooks import has_only_quiet_hooks
from amp_plugin.scaling.gradients import match_memory_order, params_of
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.step_log import HostFlag
from amp_plugin.weights import one_pass
from amp_plugin.weights.one_pass import OnePassStep

Call = Callable[[], Any]


@dataclass(frozen=True)
class OnePass:
    """One kernel divides, clips, checks the flag, steps and writes the gradients."""

    _step: OnePassStep
    divides: ClassVar[bool] = True

    def take(self, state: OptimizerState, divisor: Tensor | None, found: Tensor) -> tuple[Any, bool | None]:
        """Step unless ``found`` is 1.

        Args:
            state: Of the optimizer.
            divisor: What the kernel divides the gradients by, float32, 0-dim; None for 1.
            found: 1.0 if the step is to be skipped, float32, 0-dim.

        Returns:
            What the optimizer's step returns, and whether it was skipped; None where only the device knows.
        """
        skipped = HostFlag.at_once(found)
        self._step.take(_times_given(divisor, state.optimizer), found, skipped=skipped)
        return None, skipped

    def __str__(self) -> str:
        """Say how the step is taken."""
        return "in one pass"


@dataclass(frozen=True)
class Fused:
    """torch's fused kernel divides, unless a hook may look at the gradients before, and skips."""

    _call: Call
    _why: str  # not in one pass
    divides: bool

    def take(self, state: OptimizerState, divisor: Tensor | None, found: Tensor) -> tuple[Any, bool | None]:
        """As :meth:`OnePass.take`."""
        optimizer, keeps = state.optimizer, not state.shared.scales.enabled
        if keeps and divisor is None and HostFlag.at_once(found) is not None:
            return _take_unless(found, optimizer, self._call)  # with bits of torch's step without a scaler
        with _kernel_reads(optimizer, _times_given(divisor, optimizer), found, keeps=keeps):
            value, skipped = _take_fused(state, found, self._call)
        if divisor is not None and skipped is not False:
            state.multiply_(torch.where(found > 0, divisor.reciprocal(), 1.0))  # it has not divided
        return value, skipped

    def __str__(self) -> str:
        """Say how the step is taken, and why not in one pass."""
        return f"torch's fused step ({self._why})"


@dataclass(frozen=True)
class Informed:
    """The step of an optimizer that takes the scaler as ``grad_scaler=``; it unscales and skips by itself."""

    _call: Call
    divides: ClassVar[bool] = True

    def take(self, state: OptimizerState, divisor: Tensor | None, found: Tensor) -> tuple[Any, bool | None]:
        """As :meth:`OnePass.take`, but the optimizer decides what becomes of the gradients."""
        del state, divisor
        return self._call(), HostFlag.at_once(found)

    def __str__(self) -> str:
        """Say how the step is taken."""
        return "the optimizer's own step, which asked for the scaler"


@dataclass(frozen=True)
class Plain:
    """The optimizer's own step, on gradients unscaled and clipped in place; the host waits for the flag."""

    _call: Call
    _why: str  # not in one pass
    divides: ClassVar[bool] = False

    def take(self, state: OptimizerState, divisor: Tensor | None, found: Tensor) -> tuple[Any, bool | None]:
        """As :meth:`OnePass.take`, but nothing is left to divide."""
        del divisor
        return _take_unless(found, state.optimizer, self._call)

    def __str__(self) -> str:
        """Say how the step is taken, and why not in one pass."""
        return f"the optimizer's own step ({self._why})"


Plan = OnePass | Fused | Informed | Plain


def choose(optimizer: Optimizer, call: Call, why_not: str, *, scales: bool) -> Plan:
    """Choose how to take a step by the gradients that are there.

    Args:
        optimizer: The optimizer, or one that wraps it.
        call: Calls its own step.
        why_not: What keeps every step of it from being taken in one pass, for people; empty if nothing does.
        scales: Whether losses are scaled.
    """
    if not why_not:
        collected = one_pass.collect(optimizer)
        if isinstance(collected, OnePassStep):
            return OnePass(collected)
        why_not = collected
    if scales and takes_scaler(optimizer):
        return Informed(call)
    if is_fused(optimizer):
        return Fused(call, why_not, divides=has_only_quiet_hooks(optimizer))
    return Plain(call, why_not)


def why_not_one_pass(state: OptimizerState, optimizer: Optimizer, *, has_arguments: bool) -> str:
    """Return why no step is taken in one pass, whatever the gradients, for people; empty if steps can be."""
    if has_arguments:
        return "step() was given arguments"
    if not state.shared.one_pass:
        return "one_pass=False"
    scale_is_on = state.shared.scales.device
    if scale_is_on is not None and any(param.device != scale_is_on for param in state.params[:1]):
        return f"the loss scale is on {scale_is_on}"
    return one_pass.why_not(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own step divides by a scale and skips by itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not takes_scaler(optimizer)


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether ``step`` follows the contract before ``grad_scale`` and ``found_inf``: it wants the scaler."""
    kind: Any = type(optimizer)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and _has_grad_scaler(kind)


@cache
def _has_grad_scaler(kind: Any) -> bool:
    return hasattr(kind, "step") and "grad_scaler" in inspect.signature(kind.step).parameters


def _times_given(divisor: Tensor | None, optimizer: Optimizer) -> Tensor | None:
    """Return a divisor times the one that the optimizer's user has set, which fused optimizers read."""
    given: Tensor | None = getattr(optimizer, "grad_scale", None) if is_fused(optimizer) else None
    return divisor if given is None else given if divisor is None else divisor * given


def _take_fused(state: OptimizerState, found: Tensor, call: Call) -> tuple[Any, bool | None]:
    """Let torch's kernel divide and skip."""
    optimizer, known = state.optimizer, HostFlag.at_once(found)
    if not state.has_momentum:
        without = _without_momentum(optimizer)
        state.note_momentum(not without)
        if any(param.grad is not None for param in without) and found.item() > 0:
            return None, True
    match_memory_order(optimizer)
    return call(), known


def _take_unless(found: Tensor, optimizer: Optimizer, call: Call) -> tuple[Any, bool]:
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
