"""Prepared optimizers, which step through the scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.scaling.grad_scaler import GradScaler


class Stepping:
    """How the optimizers of one accelerator step."""

    def __init__(self) -> None:
        self.scaler = GradScaler("cpu", enabled=False)  # steps them; disabled where nothing is scaled
        self.shown: Any = None  # the public attribute scaler; None unless fp16
        self.stepped: set[int] = set()  # in this iteration, which ends where one steps again
        # While checkpoints are saved and loaded they step without the scaler: FSDP makes an optimizer's
        # state by a step with zero gradients then (huggingface/accelerate#4289).
        self.is_plain = False


class AmpOptimizer(AcceleratedOptimizer):
    """What ``AmpAccelerator.prepare`` makes of an optimizer.

    ``step`` does nothing within an accumulation window; at its end it unscales, and steps or skips.
    """

    stepping: Stepping

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step or skip at the end of an accumulation window.

        Args:
            closure: runs forward and ``accelerator.backward``, returns the loss; may be called more
                than once (LBFGS). Its gradients are unscaled before the optimizer sees them.

        Returns:
            What the optimizer's ``step`` returns; None within a window or if the step was skipped.
        """
        stepping, arguments = self.stepping, [] if closure is None else [closure]
        if stepping.is_plain:
            return self.optimizer.step(*arguments)
        if not self.gradient_state.sync_gradients:
            return None
        value = stepping.scaler.step(self.optimizer, *arguments)
        stepping.scaler.update()
        self._is_overflow = False
        if id(self) in stepping.stepped:
            stepping.stepped.clear()
        stepping.stepped.add(id(self))
        return value

    @property
    def step_was_skipped(self) -> bool:
        """Whether this optimizer's step was skipped in the present iteration.

        Of a fused optimizer on a GPU the host learns it one step later, unless ``exact_schedulers``. As in
        Accelerate, code that steps elsewhere sets ``_is_overflow`` to say that its step was skipped.
        """
        stepped = id(self) in self.stepping.stepped
        held = stepped and self.stepping.scaler.step_log.holds_schedulers(self.optimizer)
        return held or bool(self._is_overflow)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no steps taken, the optimizer known to the scaler."""
        self.__dict__.update(state)
        self.stepping.scaler.register(self.optimizer)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is LOMO, which steps in ``backward``: its ``step`` does nothing."""
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)
