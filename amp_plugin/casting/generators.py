"""Hold a context around each step of a function, generator or coroutine.

A plain ``with`` around the call would cover only the making of a generator, and one held
across a suspension would leak into whatever runs in between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Func = TypeVar("Func", bound=Callable[..., Any])


def covers_each_step(func: Func, context: AbstractContextManager[Any]) -> Func:
    """Return `func` with `context` open while its body runs, and only then; it is entered many times."""
    covered: Any
    if inspect.isasyncgenfunction(func):
        covered = _cover_async_generator(func, context)
    elif inspect.iscoroutinefunction(func):

        async def covered(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(func(*args, **kwargs), context)
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


def _cover_async_generator(
    func: Callable[..., Any], context: AbstractContextManager[Any]
) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = func(*args, **kwargs)
        try:
            resume = inner.asend(None)
            while True:
                try:
                    value = await _Steps(resume, context)
                except StopAsyncIteration:
                    return
                try:
                    resume = inner.asend((yield value))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - handed to the body
                    resume = inner.athrow(error)
        finally:
            await _Steps(inner.aclose(), context)

    return generate


class _Steps:
    """An awaitable whose every resumption runs inside a context."""

    def __init__(self, inner: Coroutine[Any, Any, Any], context: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self._context = context

    def __await__(self) -> Generator[Any, Any, Any]:
        return _each_step(self._inner.__await__(), self._context)


def _each_step(inner: Any, context: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """Drive a generator, resuming it only inside the context."""
    resume: Callable[[], Any] = functools.partial(next, inner)
    while True:
        try:
            with context:
                value = resume()
        except StopIteration as done:
            return done.value
        try:
            sent = yield value
        except GeneratorExit:
            with context:
                inner.close()
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the body
            resume = functools.partial(inner.throw, error)
        else:
            resume = functools.partial(next, inner) if sent is None else functools.partial(inner.send, sent)
