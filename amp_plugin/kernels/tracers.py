"""Keep tracers out of our own Python frames, without importing Dynamo.

Where a compiled function falls back to eager, Dynamo looks at every frame that it calls; torch.jit.trace
records every op that is called, and cannot one that takes a list of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
def outside_tracers() -> Iterator[None]:
    """Run a block, and all that it calls, without Dynamo and unseen by torch.jit.trace."""
    previous, recording = eval_frame.set_eval_frame(None), torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]
        eval_frame.set_eval_frame(previous)
