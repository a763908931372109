"""What a Trainer's user has written: methods around a step, backward calls, optimizers with closures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch.optim import Optimizer

from amp_plugin.adapters.gradient_origins import GradientOrigins
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of

_HOOK: Final = "on_before_optimizer_step"
_OF_MODULES: Final = ("configure_gradient_clipping", "clip_gradients", "optimizer_step", _HOOK)
_OF_PLUGINS: Final = (
    *("_after_closure", "_clip_gradients", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"),
    *("main_params", "optimizer_step"),
)
NOT_AFTER_CLIPPING: Final = frozenset({"optimizer_step", _HOOK})
"""Methods in which no code of the user runs between Lightning's clipping and the step."""


def users_methods(
    module: Any, is_overridden: Callable[[str, Any], bool], is_extended: Callable[[str], bool]
) -> frozenset[str]:
    """Return the methods around a step that are the user's own: of the module, a callback or the plugin.

    Any of them may look at gradients.
    """
    callbacks = {_HOOK for callback in module.trainer.callbacks if is_overridden(_HOOK, callback)}
    of_module = {method for method in _OF_MODULES if is_overridden(method, module)}
    return frozenset(callbacks | of_module | set(filter(is_extended, _OF_PLUGINS)))


class StrayGradients(GradientOrigins):
    """Refuses gradients of a manual ``training_step`` that ``self.manual_backward()`` has not made."""

    def refuse(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Raise RuntimeError if an optimizer is to step with gradients of a loss that was not scaled."""
        params = params_of(optimizer)
        strays = [param for param in params if self.take_outside(param)]
        if not scaler.has_scaled:
            strays = [param for param in params if param.grad is not None]
        if strays:
            names = dict(zip(map(id, params), scaler.parameter_names(optimizer), strict=True))
            listed = ", ".join(names[id(param)] for param in strays[:3]) + (", ..." if strays[3:] else "")
            msg = (
                f"{type(optimizer).__name__}.step(): {len(strays)} parameters ({listed}) have gradients that "
                "self.manual_backward() did not make: their loss was not scaled and fp16 lost small ones; "
                "write self.manual_backward(loss) instead of loss.backward()"
            )
            raise RuntimeError(msg)


@functools.cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may call its closure several times, or change weights before it.

    What cannot step without a closure does (LBFGS), and what says so by ``calls_closure_again = True`` (SAM).
    Others call it once, before anything else, so it may as well run before ``step()``.
    """
    kind: Any = type(optimizer)
    declared = getattr(optimizer, "calls_closure_again", None)
    return bool(_needs_closure(kind) if declared is None else declared)
