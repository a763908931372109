"""Notice gradients of a manual ``training_step`` that ``self.manual_backward()`` has not made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of


class StrayGradients:
    """The gradients that came from another backward, whose loss was not scaled.

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
        """Raise if an optimizer is to step with gradients that did not come from ``manual_backward``.

        Args:
            optimizer: it is about to step.
            scaler: knows its gradients.
            scaled: whether ``manual_backward`` has run since its last step.

        Raises:
            RuntimeError: their loss was not scaled; the text names them.
        """
        strays = self._of(optimizer)
        if not scaled and scaler.has_new_gradients(optimizer):
            strays = [param for param in params_of(optimizer) if param.grad is not None]
        if strays:
            raise RuntimeError(_text(optimizer, strays, scaler.parameter_names(optimizer)))

    def _of(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of an optimizer that have a stray gradient now."""
        if not self._strays:
            return []
        found = [(param, self._strays.pop(id(param), None)) for param in params_of(optimizer)]
        return [
            param
            for param, stray in found
            if stray is not None and param.grad is not None and stray() is param.grad
        ]


def _text(optimizer: Optimizer, strays: list[Tensor], names: list[str]) -> str:
    """Say which gradients are stray and what to write instead; ``names`` are those of all parameters."""
    name_of = dict(zip(map(id, params_of(optimizer)), names, strict=True))
    listed = ", ".join(name_of[id(param)] for param in strays[:3]) + (", ..." if strays[3:] else "")
    return (
        f"{type(optimizer).__name__}.step(): {len(strays)} parameters ({listed}) have gradients that "
        "self.manual_backward() did not make: their loss was not scaled and fp16 lost small ones; "
        "write self.manual_backward(loss) instead of loss.backward()"
    )
