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

FLUSH_BYTES = 512 * 2**20  # several times the L2 cache of any GPU
HEAD_START = 4_000_000  # the cycles (about 2 ms) that a GPU is kept busy while the host launches the call


def nothing() -> None:
    """Do nothing. This is the preparation for calls that need none."""


class Clock(Protocol):
    """Make a sample of a call. The preparation of the call and the context around it are not timed."""

    def __call__(
        self, call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
    ) -> Sample:
        """Return a function that runs ``call`` ``repeat`` times and gives the microseconds of one.

        Args:
            call: The function to time.
            repeat: The number of calls in a sample, for calls that are too short for the clock's resolution.
            prepare: A function that runs once before each sample.
            around: Makes the context in which each sample is taken.
        """
        ...


def waited() -> float:
    """Return the seconds that this process's threads have waited for a processor used by other programs.

    Linux counts them for all threads. It is 0 if the kernel does not count.
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
"""CPU time of the calling thread, for work in one thread. Other programs hardly disturb it."""

wall_time = _timed(time.perf_counter, nothing, 1)
"""Wall time, for work in several threads on a quiet machine."""


def synchronised_time(call: Call, **options: object) -> Sample:
    """Measure the wall time until an idle GPU is idle again.

    This is the time of the host's or of the device's work, whichever is longer.
    """
    return _timed(time.perf_counter, torch.cuda.synchronize, 1)(call, **options)  # type: ignore[arg-type]


def event_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Time on an idle GPU with a flushed L2 cache, from the first launch to the end of the last kernel.

    If the device waits for the host, the host's time counts too.
    """
    return _events(call, repeat, prepare, around, torch.cuda.synchronize)


def device_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Time on a GPU with a flushed L2 cache that is kept busy until the host has launched everything.

    This is the time of the kernels in a training step whose host is ahead of the device.
    """
    return _events(call, repeat, prepare, around, lambda: torch.cuda._sleep(HEAD_START))  # type: ignore[no-untyped-call]


def _events(call: Call, repeat: int, prepare: Call, around: Around, settle: Call) -> Sample:
    elsewhere = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def sample() -> float:
        prepare()
        with around():
            # Read instead of write: otherwise the L2 cache would be written to memory during the timing.
            elsewhere.sum()
            settle()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / repeat * 1e3

    return sample
