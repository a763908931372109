"""What is told of optimizer steps where nothing is scaled: bf16, fp32, a disabled scaler."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.distributed import Groups, combine
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.spread import parameter_spreads
from amp_plugin.scaling.step_result import StepResult

_NO_GROUPS = Groups()


class UnscaledSteps:
    """The last step of each optimizer: taken, at scale 1, its norm if somebody has measured it.

    So a program may ask ``last_step(optimizer).skipped`` in any precision.
    """

    def __init__(self) -> None:
        self._norms: weakref.WeakKeyDictionary[Optimizer, Tensor] = weakref.WeakKeyDictionary()
        self._results: weakref.WeakKeyDictionary[Optimizer, StepResult] = weakref.WeakKeyDictionary()

    def measure(self, optimizer: Optimizer, groups: Groups = _NO_GROUPS) -> None:
        """Measure the norm of an optimizer's gradients for its next step: one read of them, no host sync.

        Args:
            optimizer: The optimizer; DTensors' gradients are added up over their mesh.
            groups: ``sharded`` holds the groups whose ranks have different parts of plain gradients.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        spreads = parameter_spreads(params)
        parts = GradientSet(params, frozenset()).measure(2.0)
        if parts or spreads or groups:
            device = parts[0].norm.device if parts else params[0].device
            self.note(optimizer, combine(parts, 2.0, device, groups, spreads)[0])

    def note(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Keep a norm that is known already (0-dim) for the optimizer's next step."""
        self._norms[optimizer] = norm

    def stepped(self, optimizer: Optimizer) -> StepResult:
        """Note a step, and return what there is to tell of it."""
        result = self._results[optimizer] = StepResult.unscaled(self._norms.pop(optimizer, None))
        return result

    def last(self, optimizer: Optimizer) -> StepResult:
        """Return what there is to tell of an optimizer's last step.

        Raises:
            RuntimeError: It has not stepped yet.
        """
        result = self._results.get(optimizer)
        if result is None:
            msg = f"last_step(): this {type(optimizer).__name__} has not stepped yet; call its step() first"
            raise RuntimeError(msg)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the steps: they are of optimizers of this process."""
        return UnscaledSteps, ()
