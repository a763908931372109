"""Clocks that time a call. Each clock turns a call into a function that times the call."""

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
HEAD_START = 4_000_000  # keeps the GPU busy for about 2 ms, until the host has launched all kernels


def nothing() -> None:
    """Do nothing. This is the default for ``prepare``."""


class Clock(Protocol):
    """Makes a function that times a call. The measured time excludes ``prepare`` and ``around``."""

    def __call__(
        self, call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
    ) -> Sample:
        """Return a function that runs ``call`` ``repeat`` times and returns its average time in microseconds.

        Args:
            call: The function to time.
            repeat: The number of calls per sample. Use several calls if a single call is too short for the
                clock's resolution.
            prepare: A function that runs once before each sample.
            around: A function that returns the context manager in which each sample is taken.
        """
        ...


def waited() -> float:
    """Return how many seconds the threads of this process have waited for a free CPU.

    Linux records how long each thread has waited for a CPU.
    The result is 0 if the Linux kernel does not record waiting times.
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
    """Measure the wall time from the start of the call until the GPU has finished its work.

    The result is the host time or the device time, whichever is longer.
    """
    return _timed(time.perf_counter, torch.cuda.synchronize, 1)(call, **options)  # type: ignore[arg-type]


def event_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Flush the L2 cache, then measure the GPU time from the first launch to the end of the last kernel.

    The GPU is idle at first, so the result includes the time in which the GPU waits for launches.
    """
    return _events(call, repeat, prepare, around, torch.cuda.synchronize)


def device_time(
    call: Call, *, repeat: int = 1, prepare: Call = nothing, around: Around = nullcontext
) -> Sample:
    """Flush the L2 cache, then measure the GPU time of kernels that the host has launched in advance.

    The result is the time that the kernels take in a training step if the host is ahead of the GPU.
    """
    return _events(call, repeat, prepare, around, lambda: torch.cuda._sleep(HEAD_START))  # type: ignore[no-untyped-call]


def _events(call: Call, repeat: int, prepare: Call, around: Around, settle: Call) -> Sample:
    elsewhere = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def sample() -> float:
        prepare()
        with around():
            # Flush the L2 cache by reading. Data written here would be copied to memory during the timing.
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
