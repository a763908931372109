"""Keep tracers out of our own Python frames, without importing Dynamo.

Where a compiled function falls back to eager, Dynamo looks at every frame that it calls; torch.jit.trace
records every op that is called, and cannot one that takes a list of strings.
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
    """Run a plain function, and all that it calls, as it is; it may call nothing of the user's."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def outside_graphs(method: Callable[P, T]) -> Callable[P, T]:
    """Leave compiled code for a call, which decides by values: a graph break there."""
    outside = torch._disable_dynamo(untraced(method))  # type: ignore[attr-defined]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return outside(*args, **kwargs) if torch.compiler.is_compiling() else method(*args, **kwargs)

    return call


@contextmanager
def outside_tracers() -> Iterator[None]:
    """Run a block, and all that it calls, without Dynamo and unseen by torch.jit.trace."""
    previous = eval_frame.set_eval_frame(None)
    below = torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer")  # there torch refuses a change
    recording = None if below else torch._C._get_tracing_state()
    try:
        if recording is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        yield
    finally:
        if recording is not None:
            torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]
        eval_frame.set_eval_frame(previous)
