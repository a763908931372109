"""Keeps tracers out of amp_plugin's Python frames, without importing Dynamo.

If a compiled function falls back to eager mode, Dynamo still tries to trace the functions it calls.
torch.jit.trace records every op call, and fails on ops that take a list of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from typing_extensions import ParamSpec

P = ParamSpec("P")
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Keep Dynamo out of a function and everything it calls, which must not include user code."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def outside_graphs(method: Callable[P, T]) -> Callable[P, T]:
    """Break the graph at calls to a method whose control flow depends on the values of tensors."""
    outside = torch._disable_dynamo(untraced(method))  # type: ignore[attr-defined]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return outside(*args, **kwargs) if torch.compiler.is_compiling() else method(*args, **kwargs)

    return call


@contextmanager
def outside_tracers() -> Iterator[None]:
    """Keep Dynamo and torch.jit.trace out of a ``with`` block and out of everything that the block calls."""
    previous = eval_frame.set_eval_frame(None)
    # Below the Tracer dispatch key, torch refuses to change the tracing state.
    below = torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer")
    recording = None if below else torch._C._get_tracing_state()
    try:
        if recording is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        yield
    finally:
        if recording is not None:
            torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]
        eval_frame.set_eval_frame(previous)
