"""Find calls to torch's gradient clipping functions that happen before the gradients are unscaled."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef
from typing_extensions import Self

from amp_plugin.mistakes import MISTAKES
from amp_plugin.numerics.finding import Cure, Finding
from amp_plugin.numerics.places import Place, called_from
from amp_plugin.numerics.values import unwatched
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
# torch.amp.GradScaler and our GradScaler. `amp-plugin run` replaces torch.amp.GradScaler with another class.
_SCALERS: Final = [kind for kind in GradScaler.__mro__ if {"step", "unscale_"} <= vars(kind).keys()]
# At most this many calls per line are checked, because each check reads the loss scale from the device.
_MOST_LOOKS: Final = 20
# If the limit is above this number and above 1 % of the loss scale, the user has probably scaled the limit.
_LARGEST_LIMIT: Final = 10.0


def carries_scale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether the gradients of an optimizer are still multiplied by the scaler's loss scale."""
    if not scaler.is_enabled() or scaler._scale is None:
        return False
    if isinstance(scaler, GradScaler):  # reading _per_optimizer_states would have side effects on our scaler
        known = scaler.core.find(optimizer)
        return known is None or known.stage is OptState.READY
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is OptState.READY


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clip:
    """A call to a function that clips gradients.

    Attributes:
        name: The name of the function.
        limit: The limit to which the gradients are clipped.
        places: The lines that called the function, as ``called_from`` returns them.
        grad: A weak reference to one of the clipped gradients. The reference is set only if the optimizer of
            these gradients has not been passed to a scaler yet.
        version: The version counter of ``grad`` after clipping.
    """

    name: str
    limit: Any
    places: tuple[Place | None, Place | None]
    grad: Callable[[], Tensor | None] = lambda: None
    version: int = 0

    def unchanged(self) -> Tensor | None:
        """Return ``grad``, or None if the tensor no longer exists or was written to after clipping."""
        grad = self.grad()
        return grad if grad is not None and grad._version == self.version else None


class ScaledClips:
    """A region that reports each line that clips gradients before they are unscaled.

    The first ``scaler.step(optimizer)`` or ``scaler.unscale_(optimizer)`` shows that the scaler belongs to
    the optimizer. Gradients that are clipped before this first call are checked when the call is made. After
    the first call to the scaler, gradients are checked as soon as they are clipped.
    """

    def __init__(self, found: Callable[[Finding], None]) -> None:
        self._found = found
        self._optimizers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._early: list[_Clip] = []
        self._early_looks = 0
        self._looks: dict[tuple[Any, ...], int] = {}
        self._is_inside = False  # whether a clipping function is running; it may call another one
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Patch torch's gradient clipping functions, and the methods ``step`` and ``unscale_`` of scalers."""
        with ExitStack() as stack:
            for kind in _SCALERS:
                for name in ("step", "unscale_"):
                    stack.enter_context(patch.object(kind, name, self._noted(vars(kind)[name])))
            for name in _CLIPS:
                watched = self._watched(name, getattr(torch.nn.utils, name))
                for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                    if hasattr(owner, name):
                        stack.enter_context(patch.object(owner, name, watched))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the functions of torch and of the scalers."""
        self._open.close()
        self._early.clear()

    def _noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a scaler's method, so that it records the optimizer with which it is called."""

        @functools.wraps(method)
        def call(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(optimizer, Optimizer) and not torch.compiler.is_compiling():
                self._optimizers.setdefault(scaler, weakref.WeakSet()).add(optimizer)
                self._look_back(scaler, optimizer)
            return method(scaler, optimizer, *args, **kwargs)

        return call

    def _watched(self, name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a clipping function, so that the gradients are checked before they are clipped."""
        signature = inspect.signature(clip)

        @functools.wraps(clip)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling():
                return clip(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            params, limit, *_ = bound.arguments.values()
            if not isinstance(params, Tensor):
                params = bound.arguments["parameters"] = list(params)  # params may be a generator
            params = [params] if isinstance(params, Tensor) else params
            self._is_inside = True
            try:
                is_known = self._look(name, params, limit)
                clipped = clip(*bound.args, **bound.kwargs)
                if not is_known:
                    self._remember(name, params, limit)
                return clipped
            finally:
                self._is_inside = False

        return watched

    def _look(self, name: str, params: list[Tensor], limit: Any) -> bool:
        """Report a call that clips gradients before they have been unscaled.

        Return whether an optimizer of these parameters has already been passed to a scaler.
        """
        ids, is_known = {*map(id, params)}, False
        for scaler, optimizers in list(self._optimizers.items()):
            for optimizer in list(optimizers):
                if not ids.isdisjoint(map(id, params_of(optimizer))):
                    is_known = True
                    if carries_scale(scaler, optimizer):
                        self._tell(_Clip(name=name, limit=limit, places=called_from()), scaler, optimizer)
                        return True
        return is_known

    def _remember(self, name: str, params: list[Tensor], limit: Any) -> None:
        """Remember a call that clips gradients whose optimizer has not been passed to a scaler yet.

        Only the first 20 calls are remembered.
        """
        grad = next((param.grad for param in params if param.grad is not None), None)
        if grad is None or grad.is_inference() or self._early_looks >= _MOST_LOOKS:
            return
        self._early_looks += 1
        limit = limit.detach().clone() if isinstance(limit, Tensor) else limit
        reference, version = TensorWeakRef(grad), grad._version
        clip = _Clip(name=name, limit=limit, places=called_from(), grad=reference, version=version)
        self._early.append(clip)

    def _look_back(self, scaler: Any, optimizer: Optimizer) -> None:
        """Report each earlier clipping call whose gradients a scaler is about to unscale."""
        if not self._early:
            return
        early, self._early = self._early, []
        own = {id(param.grad) for param in params_of(optimizer)}
        for known in early:
            grad = known.unchanged()
            if grad is not None and id(grad) not in own:
                self._early.append(known)  # the gradient may belong to another optimizer
            elif grad is not None and carries_scale(scaler, optimizer):
                self._tell(known, scaler, optimizer)

    def _tell(self, clip: _Clip, scaler: Any, optimizer: Any) -> None:
        looks = self._looks[clip.places] = self._looks.get(clip.places, 0) + 1
        if looks > _MOST_LOOKS:
            return
        with unwatched():
            scale, largest = float(scaler._scale.item()), float(clip.limit)
        is_on_purpose = largest > _LARGEST_LIMIT and 100 * largest >= scale
        if scale == 1 or is_on_purpose:
            return
        self._looks[clip.places] = _MOST_LOOKS
        self._found(_finding(clip, scaler, optimizer, (scale, largest)))


def _finding(clip: _Clip, scaler: Any, optimizer: Any, numbers: tuple[float, float]) -> Finding:
    name, (place, caller) = clip.name, clip.places
    scale, limit = numbers
    names = _names_of((scaler, optimizer), sys._getframe(1))
    own = "clip_grad_value_" if name == "clip_grad_value_" else "clip_grad_norm_"
    shown = names or ["scaler", "optimizer"]
    cures: tuple[Cure, ...] = ()
    if names:
        where = "on the line before the clip"
        cures = (Cure(place=where, code=f"{names[0]}.unscale_({names[1]})"),)
    return Finding(
        kind="clip",
        cause="scaled clip",
        op=f"torch.nn.utils.{name}",
        place=place,
        caller=caller,
        advice=f"{MISTAKES['AMP001'].instead_with(*shown)}, or replace the clip by "
        f"{shown[0]}.{own}({shown[1]}, ...) of amp_plugin.GradScaler. In a framework, use the framework's "
        "own clip.",
        cures=cures,
        lesson=f"{scale:.10g}: the limit of {limit:g} limits the true gradients to {limit / scale:.2g}",
    )


def _names_of(wanted: Sequence[object], frame: FrameType | None) -> list[str]:
    """Return the variable names under which the program holds the given objects.

    The names come from the innermost frame that has variables for all of the objects. If no single frame has
    variables for all of the objects, return an empty list.
    """
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(("amp_plugin.", "torch.")):
            known = {**frame.f_globals, **frame.f_locals}
            found = [[name for name, held in known.items() if held is value] for value in wanted]
            if all(found):
                return [names[-1] for names in found]
        frame = frame.f_back
    return []
