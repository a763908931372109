"""Copies and pickles of an optimizer whose weights are stored in 16 bits.

torch leaves hooks out of both, so that a copy would step the 16 bits themselves, without a word. ``copy`` and
``pickle`` ask the instance for ``__reduce_ex__``: the answer is that of its class, with the store beside the
state. Whoever restores the state asks the instance for ``__setstate__``: there the copy joins the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast
from weakref import ref

from torch.optim import Optimizer

from amp_plugin.weights.optimizer_view import view_of


class Store(Protocol):
    """What is copied beside an optimizer: it is copied with its model too, so that both have one."""

    def add(self, *optimizers: Optimizer) -> None:
        """Let optimizers step masters."""


def keep_in_copies(optimizer: Optimizer, store: Store) -> None:
    """Let copies of an optimizer, shallow, deep and pickled, step masters as it does.

    Args:
        optimizer: One that steps masters already.
        store: That of its weights.
    """
    cast("Any", optimizer).__reduce_ex__ = _Reduction(optimizer, store)


class _Reduction:
    """What ``__reduce_ex__`` of an optimizer answers; it does not keep the optimizer alive."""

    def __init__(self, optimizer: Optimizer, store: Store) -> None:
        self._optimizer = ref(optimizer)
        self._store = store

    def __call__(self, protocol: int) -> tuple[Any, ...]:
        optimizer: Any = self._optimizer()
        view = view_of(optimizer)
        steps = 0 if view is None else view.steps
        of_class: Any = type(optimizer).__reduce_ex__
        make, arguments, state, *others = of_class(optimizer, protocol)
        if isinstance(state, dict):  # of a class whose state is all that it has
            state = {name: value for name, value in state.items() if value is not self}
        return _blank, (make, arguments), (state, self._store, steps), *others


def _blank(make: Callable[..., Optimizer], arguments: tuple[Any, ...]) -> Optimizer:
    optimizer = make(*arguments)
    cast("Any", optimizer).__setstate__ = _Restoration(optimizer)
    return optimizer


class _Restoration:
    """What ``__setstate__`` of an optimizer does, once."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, given: tuple[dict[str, Any], Store, int]) -> None:
        state, store, steps = given
        optimizer: Any = self._optimizer
        del optimizer.__setstate__  # that of its class is asked from now on
        optimizer.__setstate__(state)
        store.add(optimizer)
        keep_in_copies(optimizer, store)
        view = view_of(optimizer)
        if view is not None:
            view.steps = steps
