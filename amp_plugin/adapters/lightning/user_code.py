"""What a Trainer's user has written: hooks that see gradients, backward calls, optimizers with closures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch.optim import LBFGS, Optimizer

from amp_plugin.adapters.gradient_origins import GradientOrigins
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of

# -- hooks ---------------------------------------------------------------------------------------

_METHODS_OF_MODULES: Final = ("configure_gradient_clipping", "optimizer_step")
_CLIPPING_OF_MODULES: Final = ("configure_gradient_clipping", "clip_gradients")
_CLIPPING_OF_PLUGINS: Final = (
    "_after_closure",
    "_clip_gradients",
    "clip_gradients",
    "clip_grad_by_norm",
    "clip_grad_by_value",
    "main_params",
)


class UserHooks:
    """Which code of the user sees gradients between a backward pass and the end of its step.

    ``read_gradients``: whether a hook may read them before the step, so that they must be unscaled.
    """

    def __init__(
        self,
        model: Any,
        is_overridden: Callable[[str, Any], bool],
        is_extended: Callable[[str], bool],
        *,
        manual: bool,
    ) -> None:
        self._model, self._manual = model, manual
        in_plugin = any(map(is_extended, _CLIPPING_OF_PLUGINS))
        owners = (model, *model.trainer.callbacks)
        self.read_gradients = (
            in_plugin
            or is_extended("optimizer_step")
            or any(is_overridden(method, model) for method in _METHODS_OF_MODULES)
            or any(is_overridden("on_before_optimizer_step", owner) for owner in owners)
        )
        self._user_clips = in_plugin or any(is_overridden(method, model) for method in _CLIPPING_OF_MODULES)

    @property
    def clip_is_last(self) -> bool:
        """Whether the step follows on Lightning's own clipping, without code of the user in between."""
        return self._clips and not (self._manual or self._user_clips)

    @property
    def clip_is_unseen(self) -> bool:
        """Whether no code of the user can tell a clip in the gradients from one that the step works in."""
        return self.clip_is_last and not self.read_gradients

    @property
    def norm_is_lost(self) -> bool:
        """Whether the norm of unscaled gradients is taken only once they may have been changed."""
        by_value = self._clips and self._model.trainer.gradient_clip_algorithm == "value"
        return not self._manual and (by_value or self.read_gradients)

    @property
    def _clips(self) -> bool:
        return (self._model.trainer.gradient_clip_val or 0) > 0


def is_extended(plugin: Any, known: tuple[type, ...], method: str) -> bool:
    """Return whether a subclass of a plugin, or its user for this object, has a method of its own."""
    found = getattr(type(plugin), method)
    return method in vars(plugin) or all(found is not getattr(kind, method, None) for kind in known)


# -- gradients of unscaled losses ----------------------------------------------------------------


class StrayGradients(GradientOrigins):
    """Refuses gradients of a manual ``training_step`` that ``self.manual_backward()`` has not made."""

    def refuse(self, optimizer: Optimizer, scaler: GradScaler, *, scaled: bool) -> None:
        """Raise RuntimeError if an optimizer is to step with gradients of a loss that was not scaled.

        Without ``scaled``, ``manual_backward`` has not run since its last step.
        """
        strays = [param for param in params_of(optimizer) if self.take_outside(param)]
        if not scaled and scaler.has_new_gradients(optimizer):
            strays = [param for param in params_of(optimizer) if param.grad is not None]
        if strays:
            names = dict(zip(map(id, params_of(optimizer)), scaler.parameter_names(optimizer), strict=True))
            listed = ", ".join(names[id(param)] for param in strays[:3]) + (", ..." if strays[3:] else "")
            msg = (
                f"{type(optimizer).__name__}.step(): {len(strays)} parameters ({listed}) have gradients that "
                "self.manual_backward() did not make: their loss was not scaled and fp16 lost small ones; "
                "write self.manual_backward(loss) instead of loss.backward()"
            )
            raise RuntimeError(msg)


# -- closures ------------------------------------------------------------------------------------


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may call its closure several times, or change weights before it.

    LBFGS does, what cannot step without a closure, and what says so by ``calls_closure_again = True`` (SAM).
    Others call it once, before anything else, so it may as well run before ``step()``.
    """
    declared = getattr(optimizer, "calls_closure_again", None)
    kind: Any = type(optimizer)
    return bool(_needs_closure(kind) if declared is None else declared)


@functools.cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return issubclass(kind, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)
