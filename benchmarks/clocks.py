"""Ways to time a call. Each returns a sample: a function that runs the call and gives microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

Call = Callable[[], object]
Around = Callable[[], AbstractContextManager[object]]
Sample = Callable[[], float]

FLUSH_BYTES = 512 * 2**20  # several times the L2 of any GPU
HEAD_START = 4_000_000  # cycles that a GPU spins, some 2 ms, while the host starts what is timed


def nothing() -> None:
    """Do nothing: the preparation of a call that needs none."""


class Clock(Protocol):
    """Make a sample of a call; what comes before the call and the context around it are not timed."""

    def __call__(
        self, call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
    ) -> Sample:
        """Return a function that runs ``call`` ``repeat`` times and gives the microseconds of one.

        Args:
            call: What is timed.
            repeat: Calls in a sample, for calls that a clock's resolution would blur.
            prepare: Run once before each sample.
            around: Makes the context that each sample is taken in.
        """
        ...


def waited() -> float:
    """Return the seconds that this process's threads have waited for a processor that others held.

    The count comes from the kernel, for all threads. It is 0 if the kernel keeps none.
    """
    nanoseconds = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            nanoseconds += int(task.read_text(encoding="ascii").split()[1])
        except OSError:  # the thread has ended
            continue
    return nanoseconds / 1e9


def _timed(clock: Callable[[], float], settle: Call, repeat: int) -> Clock:
    def make(
        call: Call, *, repeat: int = repeat, prepare: Call = nothing, around: Around = nullcontext
    ) -> Sample:
        def sample() -> float:
            prepare()
            with around():
                settle()
                start = clock()
                for _ in range(repeat):
                    call()
                settle()
                return (clock() - start) / repeat * 1e6

        return sample

    return make


thread_time = _timed(time.thread_time, nothing, 1)
"""CPU time of the calling thread: for one thread of work; what else runs hardly disturbs it."""

wall_time = _timed(time.perf_counter, nothing, 1)
"""Wall time: for several threads of work on a quiet machine."""


def synchronised_time(call: Call, **options: object) -> Sample:
    """Wall time until an idle GPU is idle again: host and device work, whichever is longer."""
    return _timed(time.perf_counter, torch.cuda.synchronize, 1)(call, **options)  # type: ignore[arg-type]


def event_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Time from before the first to after the last launch, on an idle GPU whose L2 was flushed.

    Host time counts if the device waits for the host.
    """
    return _events(call, repeat, prepare, around, torch.cuda.synchronize)


def device_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Time on a GPU whose L2 was flushed and that is busy until the host has started everything.

    What a kernel takes in a training step whose host is ahead of the device.
    """
    return _events(call, repeat, prepare, around, lambda: torch.cuda._sleep(HEAD_START))  # type: ignore[no-untyped-call]


def _events(call: Call, repeat: int, prepare: Call, around: Around, settle: Call) -> Sample:
    elsewhere = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def sample() -> float:
        prepare()
        with around():
            elsewhere.sum()  # read, not written: a full L2 of dirty lines would go to memory while we time
            settle()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / repeat * 1e3

    return sample
