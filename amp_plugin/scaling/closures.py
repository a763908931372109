"""Closures under scaling: LBFGS, SAM, and any optimizer that calls its closure itself.

The closure scales its loss and runs backward; the gradients are unscaled and checked before it
returns to the optimizer::

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        return loss                      # not the scaled one

    scaler.step(optimizer, closure)

If one of its calls overflows, the step is given up and what it has already changed is put back.
So it is before the first call if gradients that the optimizer may look at there have overflowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from amp_plugin.scaling.backward import is_watched
from amp_plugin.scaling.memory_order import match_memory_order
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.weights.weight import fp32_shown

Closure = Callable[[], Any]


class _OverflowError(Exception):
    """Leaves ``optimizer.step`` from inside its closure."""


def take_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Closure | None, Any, dict[str, Any]]:
    """Find the closure among the arguments of ``step``, by keyword or by position."""
    if callable(kwargs.get("closure")):
        rest = dict(kwargs)
        return rest.pop("closure"), args, rest
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def step(
    window: OptimizerWindow, optimizer: Optimizer, closure: Closure, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer that calls a closure; waits for the device in each call.

    Returns:
        What ``optimizer.step`` returns; None if the step was given up.

    Raises:
        RuntimeError: The closure ran a backward from a loss that was not scaled, or returned the scaled one;
            or no loss has been scaled at all.
    """
    calls = _CheckedCalls(window, closure)
    if uses_gradients_before_closure(optimizer) and _has_earlier(window) and calls.overflowed():
        calls.close()
        return None
    saved = Snapshot(optimizer) if _may_change_weights_before_closure(optimizer) else None
    try:
        value = optimizer.step(calls.run, *args, **kwargs)
    except _OverflowError:
        value = None
        if saved is not None:
            saved.restore()
    calls.close()
    return value


class _CheckedCalls:
    """The calls of one step's closure, and what was found in their gradients."""

    def __init__(self, window: OptimizerWindow, closure: Closure) -> None:
        self._window = window
        self._closure = closure
        self._found: tuple[Tensor, Tensor] | None = None
        self._skipped = False

    def overflowed(self) -> bool:
        """Unscale the gradients; whether one is not finite."""
        self._found = _unscaled(self._window)
        self._skipped = bool(self._found[1].item() > 0)
        return self._skipped

    def run(self) -> Any:
        """Run the closure, unscale its gradients, and leave the step if they overflowed."""
        before = self._window.backwards
        with torch.enable_grad():
            loss = self._closure()
        if self._window.backwards == before:
            self._refuse_unscaled()
        _refuse_scaled(loss)
        with torch.no_grad():
            if self.overflowed():
                raise _OverflowError
        match_memory_order(self._window.optimizer)
        return loss

    def _refuse_unscaled(self) -> None:
        """Raise if gradients are new: no scaled backward has made them."""
        if any(gradients.is_changed_unscaled() for gradients in self._window.sets):
            msg = (
                "the closure ran backward() on a loss that was not scaled: call "
                "scaler.scale(loss).backward() in it, and return the unscaled loss"
            )
            raise RuntimeError(msg)

    def close(self) -> None:
        """End the optimizer's window."""
        if self._found is None:
            zero = torch.zeros((), device=self._window.device("step"))
            self._found = (zero, zero)
        norm, found = self._found
        self._window.close(norm, found, known=self._skipped)


def overflowed_before(window: OptimizerWindow) -> bool:
    """Unscale what backward passes before the closure have left; whether it is not finite: a host sync."""
    return _has_earlier(window) and bool(_unscaled(window)[1].item() > 0)


def _has_earlier(window: OptimizerWindow) -> bool:
    """Whether there are gradients that were made before the closure, as for SAM's first half."""
    return window.is_awaited() and window.has_gradients()


def _unscaled(window: OptimizerWindow) -> tuple[Tensor, Tensor]:
    window.begin_call()
    measured = window.unscale_()
    window.note_unscaled()
    return measured


def _refuse_scaled(loss: Any) -> None:
    """A line search would compare scaled losses along unscaled gradients."""
    if is_watched(loss):
        msg = "the closure returned the scaled loss: scale it for backward() only, and return the loss itself"
        raise RuntimeError(msg)


def uses_gradients_before_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may use gradients that were made before it calls its closure.

    torch's own call the closure first, which often drops those gradients.
    """
    return not type(optimizer).__module__.startswith("torch.optim")


def _may_change_weights_before_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may change anything before the last call of its closure.

    torch's own, LBFGS apart, call it once and first.
    """
    return isinstance(optimizer, LBFGS) or uses_gradients_before_closure(optimizer)


class Snapshot:
    """Copies of an optimizer's parameters, exact where they are stored in 16 bits, and of its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        with fp32_shown(params):
            self._params = [(param, param.detach().clone()) for param in params]
        self._state = {param: _copied(value) for param, value in optimizer.state.items()}
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        with fp32_shown(param for param, _ in self._params):
            for param, value in self._params:
                param.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)


def _copied(value: Any) -> Any:
    """A deep copy of optimizer state, parameters within it kept as they are."""
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return copy.copy(value)
