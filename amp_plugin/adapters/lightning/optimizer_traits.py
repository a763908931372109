"""What must be known of an optimizer before it is stepped."""

from __future__ import annotations

import inspect

from torch.optim import LBFGS, Optimizer


def evaluates_closure_again(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may call its closure several times, or change weights before it.

    torch's own call it once, before anything else, LBFGS apart: for them the closure may as
    well run before ``step()``. Others are assumed to need it, if they take one.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return isinstance(optimizer, LBFGS)
    return "closure" in inspect.signature(type(optimizer).step).parameters
