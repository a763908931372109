"""The optimizers that ``prepare()`` returns. They step through the scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from amp_plugin.adapters.session import Session
from amp_plugin.kernels.tracers import outside_graphs


class AmpOptimizer(AcceleratedOptimizer):
    """The optimizer that ``AmpAccelerator.prepare()`` returns.

    Within an accumulation window, ``step`` does nothing. At the end of an accumulation window, ``step``
    unscales the gradients, then takes or skips the optimizer step.
    """

    session: Session

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take or skip the optimizer step at the end of an accumulation window.

        Args:
            closure: a function that runs forward and ``accelerator.backward`` and returns the loss. An
                optimizer such as LBFGS calls the closure several times. Gradients are unscaled before the
                optimizer sees them.

        Returns:
            The result of the wrapped optimizer's ``step``. Within an accumulation window, or if the step was
            skipped, the result is None.
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
        """Whether this optimizer's step was skipped in the current iteration.

        With a fused optimizer on a GPU, the host learns about a skipped step one step late, unless
        ``exact_schedulers`` is on. Code outside amp_plugin that skips a step may set ``_is_overflow``, as
        with Accelerate's own optimizer.
        """
        return self.session.was_skipped(self.optimizer) or bool(self._is_overflow)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes, and register the optimizer with the scaler as one that has not stepped."""
        self.__dict__.update(state)
        self.session.scaler.register(self.optimizer)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is LOMO.

    LOMO updates weights in ``backward``, and its ``step`` does nothing.
    """
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)
