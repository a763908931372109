"""Objects of ours in the place of a library's own, in a program that makes them by the library's class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amp_plugin.casting.bound_rules import replaced

_BETWEEN: dict[tuple[type, type], type] = {}


@contextmanager
def standing_in(
    ours: type,
    theirs: type,
    *,
    may_take: Callable[[type], bool] = callable,
    arguments: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]],
    made: Callable[[Any], object] = id,
) -> Iterator[None]:
    """Make each instance of ``theirs``, or of a subclass, one of ``ours`` too, while the block runs.

    Names stay what they are: ``isinstance``, subclasses and pickles work as ever.

    Args:
        ours: a subclass of ``theirs``.
        theirs: the library's class.
        may_take: whether a class is to be taken; others stay the library's.
        arguments: the arguments by name that ours is made with, from those by position and by name.
        made: called with each instance.
    """
    original = theirs.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        if issubclass(kind, ours) or not may_take(kind):
            original(self, *args, **kwargs)
            return
        self.__class__ = class_between(ours, kind)
        ours.__init__(self, *args, **arguments(args, kwargs))  # type: ignore[misc]
        made(self)

    init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    with replaced(theirs, "__init__", init):
        yield


def class_between(ours: type, kind: type) -> type:
    """Return the class that puts our methods between a subclass's and the library's."""
    if kind in ours.__mro__:
        return ours
    if (ours, kind) not in _BETWEEN:
        names = {"__module__": kind.__module__, "__reduce__": _pickled_as(ours, kind)}
        _BETWEEN[ours, kind] = type(kind.__name__, (kind, ours), names)
    return _BETWEEN[ours, kind]


def _pickled_as(ours: type, kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a ``__reduce__``: a class made here is found by no name, that of the program is."""

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807 -- the class made here has it
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)  # Python 3.10 has none
        return _made, (ours, kind), state

    return __reduce__


def _made(ours: type, kind: type) -> Any:
    cls: Any = class_between(ours, kind)
    return cls.__new__(cls)
