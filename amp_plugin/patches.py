"""Patches attributes temporarily, and overrides methods in new instances of a library's class.

The new instances belong to a subclass of the library's class, so ``isinstance`` keeps working.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a class, module or function inside a block, then restore the old value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the random states of Python and NumPy after a block. Some libraries draw numbers on import."""
    python, numpy = random.getstate(), getattr(sys.modules.get("numpy"), "random", None)
    numpys = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(numpys)


@contextmanager
def standing_in(
    ours: type,
    theirs: type,
    *,
    may_take: Callable[[type], bool] = callable,
    arguments: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]],
    made: Callable[[Any], object] = id,
) -> Iterator[None]:
    """Make each new instance of the class ``theirs`` also an instance of the class ``ours``.

    The same applies to instances of subclasses, unless ``may_take`` returns False for the subclass. The class
    ``theirs`` is not replaced, so ``isinstance``, subclassing and pickling keep working.
    """
    original = theirs.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind: Any = type(self)
        if issubclass(kind, ours) or not may_take(kind):
            original(self, *args, **kwargs)
            return
        self.__class__ = class_between(ours, kind)
        ours.__init__(self, *args, **arguments(args, kwargs))  # type: ignore[misc]
        made(self)

    init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    with replaced(theirs, "__init__", init):
        yield


@functools.cache
def class_between(ours: type, kind: type) -> type:
    """Return a subclass of ``kind`` in which methods of ``ours`` override those of the library's class.

    The attribute ``_stands_for`` of the subclass is ``kind``.
    """
    if kind in ours.__mro__:
        return ours

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807 - no module has the class by name
        has_own = hasattr(self, "__getstate__")  # always True from Python 3.11 on
        return _made, (ours, kind), self.__getstate__() if has_own else vars(self)

    own = {"__module__": kind.__module__, "__reduce__": __reduce__, "_stands_for": kind}
    return type(kind.__name__, (kind, ours), own)


def _made(ours: type, kind: type) -> Any:
    cls: Any = class_between(ours, kind)
    return cls.__new__(cls)
