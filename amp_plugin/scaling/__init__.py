"""The gradient scaler, which scales losses and skips optimizer steps that overflow."""

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.overflows import OverflowReport
from amp_plugin.scaling.penalty import grad, gradient_penalty
from amp_plugin.scaling.step_log import StepResult

__all__ = ["GradScaler", "OverflowReport", "StepResult", "grad", "gradient_penalty"]
