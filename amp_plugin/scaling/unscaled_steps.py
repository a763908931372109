"""What is told of optimizer steps where nothing is scaled: bf16, fp32, a disabled scaler."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.collectives import Ranks
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.shard_layout import parameter_layouts
from amp_plugin.scaling.step_result import StepResult


class UnscaledSteps:
    """The last step of each optimizer: taken, at scale 1, its norm if somebody has measured it."""

    def __init__(self) -> None:
        self._norms: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()
        self._results: weakref.WeakKeyDictionary[Optimizer, StepResult] = weakref.WeakKeyDictionary()

    def note_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Keep a norm (0-dim) for the optimizer's next step."""
        self._norms[optimizer] = norm

    def measure(self, optimizer: Optimizer, ranks: Ranks) -> Tensor | None:
        """Measure the gradients for the optimizer's next step: one read of them, no host sync."""
        params = params_of(optimizer)
        layouts = parameter_layouts(params)
        measurements = GradientSet(params, frozenset()).measure()
        if not (measurements or layouts or ranks.groups):
            return None
        device = measurements[0].norm.device if measurements else params[0].device
        norm, _ = ranks.combine(measurements, 2.0, device, layouts)
        self.note_norm(optimizer, norm)
        return norm

    def note_step(self, optimizer: Optimizer) -> StepResult:
        """Note a step, and return what there is to tell of it."""
        result = self._results[optimizer] = StepResult.unscaled(self._norms.pop(optimizer, None))
        return result

    def last(self, optimizer: Optimizer) -> StepResult | None:
        """Return what there is to tell of the optimizer's last step; None before the first."""
        return self._results.get(optimizer)
