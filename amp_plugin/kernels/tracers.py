"""Keep tracers out of our own Python frames, without importing Dynamo.

Where a compiled function falls back to eager, Dynamo looks at every frame that it calls; torch.jit.trace
records every op that is called, and cannot one that takes a list of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Run a function, and all that it calls, as it is.

    Args:
        function: a plain Python function that calls nothing of the user's.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


@contextmanager
def outside_tracers() -> Iterator[None]:
    """Run a block, and all that it calls, without Dynamo and unseen by torch.jit.trace."""
    previous, recording = eval_frame.set_eval_frame(None), torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]
        eval_frame.set_eval_frame(previous)
