"""A scaler that a user has put in the place of ours: torch's own, a subclass, a mock that wraps one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import GradientLedger, make_ledger
from amp_plugin.scaling.loss_scale import LaterScale
from amp_plugin.scaling.overflow_report import OverflowReport
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.skipped_steps import SkippedSteps
from amp_plugin.scaling.step_result import StepResult

Value = TypeVar("Value")


class ByOptimizer(weakref.WeakKeyDictionary[Any, Value]):
    """What is known of optimizers as long as they live; copies and pickles start empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ByOptimizer[Value]:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class ForeignScaler(GradScaler):
    """Drive another scaler by torch's calls alone, in the stock plugins' order.

    An adapter asks it whatever it asks a scaler of ours. One step is::

        theirs.unscale_(optimizer)    unless a fused optimizer does it, and nothing is clipped
        theirs.step(optimizer)
        theirs.update()               nothing of all this where no gradient is

    Args:
        theirs: the other scaler; anything with ``scale``, ``unscale_``, ``step`` and ``update``.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__("cpu", enabled=False)
        self.theirs = theirs
        self._losses = 0
        self._has_stepped = False
        self._unscaled: ByOptimizer[_Unscaled] = ByOptimizer()
        self._results: ByOptimizer[StepResult] = ByOptimizer()
        self._later = LaterScale()
        self._skipped = SkippedSteps()

    def is_enabled(self) -> bool:
        """Return what the other scaler says."""
        return bool(self.theirs.is_enabled())

    @property
    def has_scaled(self) -> bool:
        """Whether a loss has been scaled yet, by this object or by the other scaler itself."""
        return self._losses > 0 or self.current_scale() is not None

    def place(self, device: str, **groups: Any) -> None:
        """Leave the other scaler where it is."""

    def register(self, *optimizers: Optimizer, names: Any = None) -> None:
        """Note the names of parameters; the other scaler knows of no optimizers."""
        super().register(*(known for known in optimizers if isinstance(known, Optimizer)), names=names)

    def scale(self, outputs: Any, *, name: str | None = None) -> Any:
        """Let the other scaler multiply the loss."""
        self._losses += 1
        return self.theirs.scale(outputs)

    def ensure_unscaled(self, optimizer: Any) -> None:
        """Let the other scaler unscale the gradients, once a step.

        Gradients in place of those of a dropped batch are shown to it too; torch's scaler raises then.
        """
        self._unscale(optimizer, unseen=self._losses == 0)

    def _unscale(self, optimizer: Any, *, unseen: bool) -> None:
        """Unscale once; ``unseen`` losses, which a program scales itself, may have come after that."""
        seen = self._unscaled.get(optimizer)
        again = seen is not None and (unseen or self._losses > seen.losses) and seen.are_replaced()
        if _has_gradients(optimizer) and (seen is None or again):
            self.theirs.unscale_(optimizer)
            self._unscaled[optimizer] = _Unscaled(optimizer, self._losses)

    def clip_grad_norm_(
        self, optimizer_or_params: Any, *args: Any, fold: bool = False, **kwargs: Any
    ) -> Tensor:
        """Clip the unscaled gradients of an optimizer by torch's function."""
        self.ensure_unscaled(optimizer_or_params)
        return super().clip_grad_norm_(optimizer_or_params, *args, **kwargs)

    def clip_grad_value_(self, optimizer_or_params: Any, clip_value: float) -> None:
        """Clip each element of the unscaled gradients of an optimizer."""
        self.ensure_unscaled(optimizer_or_params)
        super().clip_grad_value_(optimizer_or_params, clip_value)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the other scaler step or skip, and note which it did."""
        if not _has_gradients(optimizer):
            value = optimizer.step(*args, **kwargs)
            self._results[optimizer] = StepResult.unscaled()
            return value
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._unscale(optimizer, unseen=False)
        before = self.current_scale()
        with _watched(optimizer) as taken:
            value = self.theirs.step(optimizer, *args, **kwargs)
        self._has_stepped = True
        self._note(optimizer, taken, None if before is None else before.clone())
        return value

    def _note(self, optimizer: Any, taken: list[Tensor], before: Tensor | None) -> None:
        """Note what became of a step: as the other scaler tells it if it can, else as it was seen."""
        told = getattr(self.theirs, "last_step", None)
        result = None if told is None else told(optimizer)
        if not isinstance(result, StepResult):
            result = StepResult(
                norm=super().note_step(optimizer).norm,
                found_inf=taken[0] if taken else torch.ones(()),
                scale_before=before,
                scale_after=self._later,
                report=partial(_report, optimizer, self.parameter_names),
            )
        self._results[optimizer] = result
        self._skipped.add(result.found_inf)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the other scaler update its scale, if it has stepped."""
        if not self._has_stepped:
            return
        self._has_stepped = False
        self._unscaled.clear()
        self.theirs.update()
        after = self.current_scale()
        if after is not None:
            self._later.value = after.clone()
            self._later = LaterScale()

    def result_of(self, optimizer: Any) -> StepResult | None:
        """Return what became of the optimizer's last step; None if it has not stepped yet."""
        return self._results[optimizer] if optimizer in self._results else super().result_of(optimizer)

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of all optimizers: a host sync."""
        return self._skipped.item()

    def get_scale(self, name: str | None = None) -> float:
        """Return the other scaler's scale as a number: a host sync."""
        return self.theirs.get_scale()  # type: ignore[no-any-return]

    def current_scale(self) -> Tensor | None:
        """Return the other scaler's scale on its device, 0-dim; None before the first loss."""
        return self._get_scale_async()

    def _get_scale_async(self) -> Tensor | None:
        scale = self.theirs._get_scale_async()
        return scale if isinstance(scale, Tensor) else None  # else a mock's

    def has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Take gradients as they are, as the stock plugins do."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the other scaler's state."""
        return dict(self.theirs.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the other scaler take a state over."""
        self.theirs.load_state_dict(state_dict)


class _Unscaled:
    """The gradients of an optimizer that were unscaled, after some number of ``losses``."""

    def __init__(self, optimizer: Any, losses: int) -> None:
        self.losses = losses
        self._params = [*params_of(optimizer)] if isinstance(optimizer, Optimizer) else []
        self._ledger = make_ledger()
        self._ledger.remember(self._params, 0)

    def are_replaced(self) -> bool:
        """Whether there are others in their place, as after ``zero_grad()`` without a step."""
        return bool(self._ledger.compare(self._params, 0) == GradientLedger.NEW)


_CALLS = ("scale", "unscale_", "step", "update")


def scaler_in_place_of_ours(given: Any, name: str) -> GradScaler:
    """Return the scaler that a plugin asks where a user has given it another; None: nothing is scaled.

    Args:
        given: what the user has assigned.
        name: the attribute, for the error.

    Raises:
        TypeError: it is no scaler.
    """
    if given is None:
        return GradScaler("cpu", enabled=False)
    if issubclass(type(given), GradScaler):  # a mock only says so
        return given  # type: ignore[no-any-return]
    missing = [call for call in _CALLS if not callable(getattr(given, call, None))]
    if missing:
        msg = (
            f"{name} = {given!r}: this is no GradScaler, it has no {', '.join(missing)}; give an "
            "amp_plugin.GradScaler, a torch.amp.GradScaler, or None to scale no loss"
        )
        raise TypeError(msg)
    return ForeignScaler(given)


def scaler_shown(scaler: GradScaler) -> Any:
    """Return the scaler as its user knows it; None if nothing is scaled."""
    if isinstance(scaler, ForeignScaler):
        return scaler.theirs
    return scaler if scaler.is_enabled() else None


@contextmanager
def _watched(optimizer: Any) -> Iterator[list[Tensor]]:
    """Give a list that is empty until the optimizer steps; then it holds its found_inf, 0-dim."""
    taken: list[Tensor] = []

    def stepped(stepping: Any, *_: Any) -> None:
        found_inf = getattr(stepping, "found_inf", None)  # a fused optimizer skips by it, on the device
        taken.append(torch.zeros(()) if found_inf is None else found_inf.detach().clone().reshape(()))

    if not isinstance(optimizer, Optimizer):
        stepped(optimizer)
        yield taken
        return
    handle = optimizer.register_step_post_hook(stepped)
    try:
        yield taken
    finally:
        handle.remove()


def _has_gradients(optimizer: Any) -> bool:
    """Whether an optimizer has any gradient; what is no optimizer is not asked."""
    if not isinstance(optimizer, Optimizer):
        return True
    return any(param.grad is not None for param in params_of(optimizer))


def _report(optimizer: Optimizer, names: Callable[[Optimizer], list[str]]) -> OverflowReport:
    """Say which gradients are not finite now."""
    named = zip(names(optimizer), params_of(optimizer), strict=True)
    grads = [(name, param.grad) for name, param in named if param.grad is not None]
    return OverflowReport(
        inf=tuple(name for name, grad in grads if grad.isinf().any()),
        nan=tuple(name for name, grad in grads if grad.isnan().any()),
        checked=len(grads),
    )
