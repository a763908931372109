"""What must be known of an optimizer before it is stepped."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.optim import LBFGS, Optimizer

from amp_plugin.scaling.closures import uses_gradients_before_closure
from amp_plugin.scaling.grad_scaler import GradScaler


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may call its closure several times, or change weights before it.

    LBFGS does, and what cannot step without a closure. Others call it once, before anything
    else, so it may as well run before ``step()``; one that does not (SAM) says so by an attribute
    ``calls_closure_again = True``, and is stepped with a copy of its weights kept at hand.
    """
    declared = getattr(optimizer, "calls_closure_again", None)
    kind: Any = type(optimizer)
    return bool(_needs_closure(kind) if declared is None else declared)


@functools.cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return issubclass(kind, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)


def gives_up_at_once(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether earlier micro-batches have overflowed and the step would not call its closure."""
    return (
        scaler.has_scaled
        and uses_gradients_before_closure(optimizer)
        and scaler.overflowed_before_closure(optimizer)
    )
