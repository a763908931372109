"""What a Trainer's user has written: hooks that see gradients, backward calls, optimizers with closures."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

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


class StrayGradients:
    """The gradients of a manual ``training_step`` that ``self.manual_backward()`` has not made.

    A hook on each parameter tells; a stray gradient is one that a backward outside :meth:`expected`
    has made or added to, until it is dropped (``zero_grad``, as after an attack on the inputs).
    """

    def __init__(self) -> None:
        self._expected = False
        self._strays: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch the parameters of these optimizers, and no others any more."""
        self.release()
        params = {id(param): param for optimizer in optimizers for param in params_of(optimizer)}
        with torch._C.DisableTorchFunctionSubclass():  # which refuses hooks on lazy parameters
            self._handles = [
                param.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
                for param in params.values()
                if param.requires_grad
            ]

    def release(self) -> None:
        """Watch no parameter any more."""
        while self._handles:
            self._handles.pop().remove()
        self._strays.clear()

    def _made(self, param: Tensor) -> None:
        if not self._expected and param.grad is not None:
            self._strays[id(param)] = weakref.ref(param.grad)

    _made.keeps_gradients = True  # type: ignore[attr-defined] # else the scaler watches for gradients it takes

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Take what is made within for gradients of a scaled loss."""
        before, self._expected = self._expected, True
        try:
            yield
        finally:
            self._expected = before

    def refuse(self, optimizer: Optimizer, scaler: GradScaler, *, scaled: bool) -> None:
        """Raise RuntimeError if an optimizer is to step with gradients of a loss that was not scaled.

        Without ``scaled``, ``manual_backward`` has not run since its last step.
        """
        strays = [param for param in params_of(optimizer) if self._is_stray(param)]
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

    def _is_stray(self, param: Tensor) -> bool:
        stray = self._strays.pop(id(param), None)
        return stray is not None and param.grad is not None and stray() is param.grad


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
