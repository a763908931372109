"""Keep Dynamo out of our own Python frames, without importing Dynamo.

Where a compiled function falls back to eager, Dynamo looks at every frame that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo import eval_frame


def skip_frames_of(*functions: Callable[..., Any]) -> None:
    """Run these functions as they are; what they call is looked at as ever.

    Args:
        *functions: plain Python functions.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
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
