"""Keep Dynamo out of our own Python frames, without importing Dynamo.

Where a compiled function falls back to eager, Dynamo looks at every frame that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo import eval_frame


def skip_frames_of(*functions: Callable[..., Any]) -> None:
    """Run these functions, and all that they call, as they are.

    Args:
        *functions: plain Python functions that call nothing of the user's.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


@contextmanager
def outside_dynamo() -> Iterator[None]:
    """Run a block, and all that it calls, without Dynamo."""
    previous = eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        eval_frame.set_eval_frame(previous)
