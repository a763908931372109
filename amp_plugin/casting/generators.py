"""Hold a context around each step of a function, generator or coroutine.

A plain ``with`` around the call would cover only the making of a generator, and one held
across a suspension would leak into whatever runs in between.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Func = TypeVar("Func", bound=Callable[..., Any])


def covers_each_step(func: Func, context: AbstractContextManager[Any]) -> Func:
    """Return `func` with `context` open while its body runs, and only then; it is entered many times."""
    covered: Any
    if inspect.isasyncgenfunction(func):
        msg = f"autocast: {func.__name__} is an asynchronous generator; open the region between its yields"
        raise TypeError(msg)
    if inspect.iscoroutinefunction(func):

        async def covered(*args: Any, **kwargs: Any) -> Any:
            return await _each_step(func(*args, **kwargs), context)
    elif inspect.isgeneratorfunction(func):

        def covered(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _each_step(func(*args, **kwargs), context))
    else:

        def covered(*args: Any, **kwargs: Any) -> Any:
            with context:
                return func(*args, **kwargs)

    functools.update_wrapper(covered, func)
    covered.__script_unsupported = "@autocast() decorator is not supported in script mode"
    return covered  # type: ignore[no-any-return]


@types.coroutine
def _each_step(inner: Any, context: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """Drive a generator or coroutine, resuming it only inside the context."""
    resume = functools.partial(inner.send, None)
    while True:
        try:
            with context:
                value = resume()
        except StopIteration as done:
            return done.value
        try:
            resume = functools.partial(inner.send, (yield value))
        except BaseException as error:  # noqa: BLE001 - handed to the body, as GeneratorExit is
            resume = functools.partial(inner.throw, error)
