"""Measure how long the host takes to launch ops on CUDA tensors, on a machine without a GPU.

The CUDA tensors are emulated in host memory, and the emulated CUDA driver runs no kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting
from tests.host_device import host_device

MOST = {("norm_check", 1): 10.0, ("norm_check", 400): 20.0, ("norm_check", 10_000): 300.0}  # microseconds

NAMES = {"survey": "inspect each gradient, launch nothing"}


class Child:
    """A child process that emulates a CUDA device in host memory."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.host_time_child"],
            env=host_device.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            msg = "the device made of host memory does not start; see its message above"
            raise RuntimeError(msg)

    def _answer(self) -> str:
        assert self._process.stdout is not None  # for the type checker
        return self._process.stdout.readline().strip()

    def microseconds(self, op: str, count: int) -> float:
        """Return the time of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{op} {count}\n")
        self._process.stdin.flush()
        return float(self._answer())


@cache
def child() -> Child:
    """Return the child process, which ends when this process ends."""
    return Child()


class HostTime(Section):
    """Time ops on 1 to 10 000 CUDA tensors at fixed addresses, from the C++ call to the driver call."""

    key = "host"
    timing = "wall time of the host, without the driver's own calls, about 2 µs per launch"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield each op."""
        if host_device.cannot():  # the emulation needs g++ and a CPU build of torch
            return
        for op in ("norm_check", "survey", "unscale_", "multiply_", "clip_factor"):
            for count in (1,) if op == "clip_factor" else setting.sized((1, 400, 10_000), (1, 3)):
                limit, name = MOST.get((op, count)), NAMES.get(op, op)
                yield Comparison(
                    name=f"{name}, {count} tensors" if count > 1 else name,
                    table="Host time of an op on CUDA tensors, with an emulated CUDA driver",
                    samples={OURS: lambda op=op, count=count: child().microseconds(op, count)},
                    rounds=setting.rounds(21),
                    gates=() if limit is None else (Gate(limit=limit, measure="ours", against=OURS),),
                )


SECTIONS = (HostTime(),)
