"""Losses and their backward passes."""

from __future__ import annotations

import math
from typing import Any

from tests.fuzz.predictions import are_unscaled
from tests.fuzz.run import Run
from tests.fuzz.scene import named, terms


def backward(run: Run, name: str, pairs: Any, overflow: int | None) -> None:
    """``scale(loss).backward()``; perhaps with a gradient that is not finite."""
    pairs = [(i, math.inf if i == overflow else factor) for i, factor in pairs]
    run.scene.run(f"scaler.scale(loss({terms(pairs)}){named(name)}).backward()")
    run.oracle.scale(name)
    run.backward(name, "loss", pairs)


def scale_early(run: Run, name: str, pairs: Any) -> None:
    """Scale a loss whose backward comes later."""
    run.scene.run(f"early = scaler.scale(linear({terms(pairs)}){named(name)})")
    run.oracle.scale(name)
    run.early = (name, pairs)


def backward_early(run: Run) -> None:
    """The backward of a loss that was scaled before."""
    if run.early is not None:
        run.scene.run("early.backward(); del early")
        (name, pairs), run.early = run.early, None
        run.backward(name, "linear", pairs)


def regularise(run: Run, o: int) -> None:
    """Add the gradient of a loss that is not scaled to unscaled gradients."""
    members = run.members(o)
    if are_unscaled(run.oracle, members) and run.oracle.present(members) == members:
        pairs = [(i, 0.5) for i in members]
        run.scene.run(f"linear({terms(pairs)}).backward()")
        for index in members:
            run.oracle.edit(index, lambda grad: grad.add_(0.5))
