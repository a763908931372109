"""The scaling core: keep gradients representable, step safely."""

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.overflows import OverflowReport
from amp_plugin.scaling.penalty import grad, gradient_penalty
from amp_plugin.scaling.step_log import StepResult

__all__ = ["GradScaler", "OverflowReport", "StepResult", "grad", "gradient_penalty"]
