"""Prepared optimizers, which step through the scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from amp_plugin.adapters.session import Session
from amp_plugin.kernels.tracers import outside_graphs


class AmpOptimizer(AcceleratedOptimizer):
    """What ``AmpAccelerator.prepare`` makes of an optimizer.

    ``step`` does nothing within an accumulation window; at its end it unscales, and steps or skips.
    """

    session: Session

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step or skip at the end of an accumulation window.

        Args:
            closure: runs forward and ``accelerator.backward``, returns the loss; may be called more
                than once (LBFGS). Its gradients are unscaled before the optimizer sees them.

        Returns:
            What the optimizer's ``step`` returns; None within a window or if the step was skipped.
        """
        arguments = [] if closure is None else [closure]
        if not (self.gradient_state.sync_gradients or self.session.is_aside):
            return None
        value = self.session.step(self.optimizer, *arguments)
        if not self.session.is_aside:
            self._is_overflow = False
        return value

    @property
    def step_was_skipped(self) -> bool:
        """Whether this optimizer's step was skipped in the present iteration.

        Of a fused optimizer on a GPU the host learns it one step later, unless ``exact_schedulers``. As in
        Accelerate, code that steps elsewhere sets ``_is_overflow`` to say that its step was skipped.
        """
        return self.session.was_skipped(self.optimizer) or bool(self._is_overflow)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no steps taken, the optimizer known to the scaler."""
        self.__dict__.update(state)
        self.session.scaler.register(self.optimizer)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is LOMO, which steps in ``backward``: its ``step`` does nothing."""
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)
