"""Which backward pass has made a gradient: one of the framework's, whose loss was scaled, or another."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class GradientOrigins:
    """Knows of watched parameters whether a backward pass within :meth:`inside` has made their gradients.

    A hook on each parameter tells. What is known of a gradient ends when it is dropped (``zero_grad``).
    """

    def __init__(self) -> None:
        self._is_inside = False
        self._reached: list[Tensor] = []  # parameters, by the present pass inside
        self._inside: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients with their versions
        self._outside: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch these parameters, and no others any more."""
        self.unwatch()
        distinct: dict[int, Any] = {id(param): param for param in params if param.requires_grad}
        with torch._C.DisableTorchFunctionSubclass():  # which refuses hooks on lazy parameters
            hook = self._note
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in distinct.values()]

    def unwatch(self) -> None:
        """Watch no parameter any more."""
        while self._handles:
            self._handles.pop().remove()
        self._inside.clear()
        self._outside.clear()

    def _note(self, param: Tensor) -> None:
        if self._is_inside:
            self._reached.append(param)
        elif param.grad is not None:
            self._outside[id(param)] = weakref.ref(param.grad)

    _note.keeps_gradients = True  # type: ignore[attr-defined] # else the scaler watches for gradients it takes

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take what is made within for gradients of a scaled loss."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before
            while self._reached:  # DDP writes to gradients after the hook
                param = self._reached.pop()
                if param.grad is not None:
                    self._inside[id(param)] = weakref.ref(param.grad), param.grad._version

    def is_scaled(self, param: Tensor) -> bool:
        """Whether a pass inside has made its gradient, and nobody has written to it since."""
        made, version = self._inside.get(id(param), (None, 0))
        grad = param.grad
        return made is not None and grad is not None and made() is grad and version == grad._version

    def is_from_outside(self, param: Tensor) -> bool:
        """Whether a pass outside has made or added to its gradient."""
        made = self._outside.get(id(param))
        return made is not None and param.grad is not None and made() is param.grad

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without what is watched: it belongs to this process."""
        return type(self), ()
