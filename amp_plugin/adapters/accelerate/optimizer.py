"""AmpOptimizer: a prepared optimizer that steps through GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate.refusals import refuse_before_backward
from amp_plugin.scaling.grad_scaler import GradScaler


class Iteration:
    """Which optimizers have stepped in the present iteration.

    It is over when one steps that has already stepped in it: so a skip counts until then, and never for an
    optimizer that did not step.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the steps: those were of optimizers of this process."""
        return Iteration, ()

    def note_step(self, key: int) -> None:
        """Record a step of the optimizer with this identity."""
        if key in self._stepped:
            self._stepped.clear()
        self._stepped.add(key)

    def has_stepped(self, key: int) -> bool:
        """Whether the optimizer with this identity has stepped in it."""
        return key in self._stepped


class AmpOptimizer(AcceleratedOptimizer):
    """What ``AmpAccelerator.prepare`` makes of an optimizer.

    ``step`` does nothing within an accumulation window; at its end it unscales, and steps or skips.

    Attributes:
        scaler: the accelerator's ``scaler``; None unless fp16.
    """

    scaler: Any
    _grad_scaler: GradScaler
    _iteration: Iteration

    @classmethod
    def adopt(
        cls,
        prepared: AcceleratedOptimizer,
        grad_scaler: GradScaler,
        iteration: Iteration,
        *,
        scaler: Any,
    ) -> AmpOptimizer:
        """Turn an optimizer that Accelerate has prepared into one of ours.

        Args:
            prepared: made without a scaler.
            grad_scaler: steps it; a disabled one where nothing is scaled.
            iteration: shared by the optimizers of one accelerator.
            scaler: the attribute of that name.
        """
        prepared.__class__ = cls
        prepared._iteration = iteration
        prepared.follow(grad_scaler, scaler=scaler)
        return prepared  # type: ignore[no-any-return]

    def follow(self, grad_scaler: GradScaler, *, scaler: Any) -> None:
        """Step through a scaler from now on; the arguments are those of :meth:`adopt`."""
        self._grad_scaler, self.scaler = grad_scaler, scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step or skip at the end of an accumulation window.

        Args:
            closure: runs forward and ``accelerator.backward``, returns the loss; may be called more
                than once (LBFGS). Its gradients are unscaled before the optimizer sees them.

        Returns:
            What the optimizer's ``step`` returns; None within a window or if the step was skipped.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if closure is None:
            refuse_before_backward(self._grad_scaler, "optimizer.step()")
        value = self._grad_scaler.step(self.optimizer, *([] if closure is None else [closure]))
        self._grad_scaler.update()
        self._is_overflow = False
        self._iteration.note_step(id(self))
        return value

    @property
    def step_was_skipped(self) -> bool:
        """Whether this optimizer's step was skipped in the present iteration.

        Of a fused optimizer on a GPU the host learns it one step later, unless ``exact_schedulers``. As in
        Accelerate, code that steps elsewhere sets ``_is_overflow`` to say that its step was skipped.
        """
        stepped = self._iteration.has_stepped(id(self))
        held = stepped and self._grad_scaler.step_log.holds_schedulers(self.optimizer)
        return held or bool(self._is_overflow)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Step without the scaler: checkpoints make optimizer state by a step with zero gradients."""
        own = self._grad_scaler, self._iteration
        plain = GradScaler("cpu", enabled=False, on_nonfinite="ignore")
        self._grad_scaler, self._iteration = plain, Iteration()
        try:
            yield
        finally:
            self._grad_scaler, self._iteration = own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no steps taken, the optimizer known to the scaler."""
        self.__dict__.update(state)
        self._grad_scaler.register(self.optimizer)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Whether an optimizer is LOMO, which Accelerate steps in ``backward``: its ``step`` does nothing."""
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that Accelerate has wrapped, or the one given."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
