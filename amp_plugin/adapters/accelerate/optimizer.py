"""AmpOptimizer: a prepared optimizer that steps through GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate.skips import SkipLedger
from amp_plugin.adapters.unscaled_steps import UnscaledSteps
from amp_plugin.scaling.grad_scaler import GradScaler


class AmpOptimizer(AcceleratedOptimizer):
    """What ``AmpAccelerator.prepare`` makes of an optimizer.

    ``step`` does nothing within an accumulation window; at its end it unscales, and steps or skips.
    """

    scaler: GradScaler | None
    _skips: SkipLedger
    _unscaled_steps: UnscaledSteps

    @classmethod
    def adopt(
        cls,
        prepared: AcceleratedOptimizer,
        scaler: GradScaler | None,
        skips: SkipLedger,
        unscaled_steps: UnscaledSteps,
    ) -> AmpOptimizer:
        """Turn an optimizer that Accelerate has prepared into one of ours.

        Args:
            prepared: made without a scaler.
            scaler: None where nothing is scaled.
            skips: shared by the optimizers of one accelerator.
            unscaled_steps: so too.
        """
        prepared.__class__ = cls
        prepared.scaler, prepared._skips, prepared._unscaled_steps = scaler, skips, unscaled_steps
        return prepared  # type: ignore[no-any-return]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step or skip at the end of an accumulation window.

        Args:
            closure: runs forward and ``accelerator.backward``, returns the loss; may be called more
                than once (LBFGS). Its gradients are unscaled before the optimizer sees them.

        Returns:
            What the optimizer's ``step`` returns; None within a window or if the step was skipped.
        """
        if self.scaler is None:
            value = super().step(closure)
            if self.gradient_state.sync_gradients:
                self._unscaled_steps.stepped(self.optimizer)
            return value
        if not self.gradient_state.sync_gradients:
            return None
        if closure is None:
            refuse_before_backward(self.scaler, "optimizer.step()")
        value = self.scaler.step(self.optimizer, *([] if closure is None else [closure]))
        if self.scaler.is_enabled():
            self.scaler.update()
            self._skips.stepped(id(self), self.scaler.last_step(self.optimizer))
        else:
            self._unscaled_steps.stepped(self.optimizer)
        return value

    @property
    def step_was_skipped(self) -> bool:
        """Whether this optimizer's step was skipped in the present iteration.

        Of a fused optimizer on a GPU the host learns it one step later, unless ``exact_schedulers``.
        """
        return self.scaler is not None and self._skips.skipped(id(self))

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Step without the scaler: checkpoints make optimizer state by a step with zero gradients."""
        scaler, self.scaler = self.scaler, None
        try:
            yield
        finally:
            self.scaler = scaler

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what was told about past steps."""
        return {**super().__getstate__(), "_skips": None, "_unscaled_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no steps taken, the optimizer known to the scaler."""
        self.__dict__.update(state)
        self._skips, self._unscaled_steps = SkipLedger(exact=False), UnscaledSteps()
        if self.scaler is not None:
            self.scaler.register(self.optimizer)


def refuse_before_backward(scaler: GradScaler, call: str) -> None:
    """Raise if no loss has been scaled yet: gradients, if any, came from a loss that was not.

    Raises:
        RuntimeError: ``accelerator.backward`` has not been called.
    """
    if scaler.is_enabled() and scaler._scale is None:
        msg = (
            f"{call} before any accelerator.backward(loss): fp16 needs its scaled loss; "
            "write accelerator.backward(loss) instead of loss.backward()"
        )
        raise RuntimeError(msg)


@contextmanager
def naming_unprepared(scaler: GradScaler, params: list[Tensor], call: str) -> Iterator[None]:
    """Let the scaler's error about parameters of no optimizer it knows say what to do in Accelerate.

    Raises:
        RuntimeError: parameters with gradients belong to no optimizer that was prepared.
    """
    try:
        yield
    except RuntimeError:
        optimizers = [record.optimizer for record in scaler._registry]
        known = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}
        foreign = sum(param.grad is not None and id(param) not in known for param in params)
        if not foreign:
            raise
        msg = (
            f"{call}: {foreign} of the {len(params)} parameters belong to no prepared optimizer, so that in "
            "fp16 the scale of their gradients is unknown; call optimizer = accelerator.prepare(optimizer) "
            "for the one that steps them, or clip the parameters of prepared optimizers only"
        )
        raise RuntimeError(msg) from None


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that Accelerate has wrapped, or the one given."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
