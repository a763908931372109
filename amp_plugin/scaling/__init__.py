"""The scaling core: keep gradients representable, step safely."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_plugin.scaling.grad_scaler import GradScaler as GradScaler
    from amp_plugin.scaling.overflows import OverflowReport as OverflowReport
    from amp_plugin.scaling.penalty import grad as grad
    from amp_plugin.scaling.penalty import gradient_penalty as gradient_penalty
    from amp_plugin.scaling.step_result import StepResult as StepResult

_HOME = {
    "GradScaler": "amp_plugin.scaling.grad_scaler",
    "OverflowReport": "amp_plugin.scaling.overflows",
    "StepResult": "amp_plugin.scaling.step_result",
    "grad": "amp_plugin.scaling.penalty",
    "gradient_penalty": "amp_plugin.scaling.penalty",
}

__all__ = ["GradScaler", "OverflowReport", "StepResult", "grad", "gradient_penalty"]


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    if name not in _HOME:
        msg = f"module 'amp_plugin.scaling' has no attribute {name!r}; it has {', '.join(__all__)}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(_HOME[name]), name)
