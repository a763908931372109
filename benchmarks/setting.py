"""The device and the size of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.clocks import Clock, device_time, event_time, synchronised_time, thread_time, wall_time
from benchmarks.harness import Comparison

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The device of a benchmark run, and whether the run is only a smoke test with tiny sizes.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        tiny: Use tiny sizes and few rounds, as a smoke test that the benchmarks run without errors.
    """

    device: str = "cpu"
    tiny: bool = False

    def __post_init__(self) -> None:
        if self.device not in {"cpu", "cuda"}:
            msg = f"benchmarks run on 'cpu' and 'cuda', not on {self.device!r}"
            raise ValueError(msg)

    @property
    def host_clock(self) -> Clock:
        """The timer for work that spends most of its time launching ops."""
        return thread_time if self.device == "cpu" else synchronised_time

    @property
    def memory_clock(self) -> Clock:
        """The timer for work whose speed is limited by memory bandwidth."""
        return wall_time if self.device == "cpu" else event_time

    @property
    def device_clock(self) -> Clock:
        """The timer that measures how long the device computes, excluding the time to launch kernels."""
        return wall_time if self.device == "cpu" else device_time

    def sized(self, usual: T, tiny: T) -> T:
        """Return ``usual``, or ``tiny`` if the run is a smoke test."""
        return tiny if self.tiny else usual

    def rounds(self, usual: int) -> int:
        """Return the number of rounds of a comparison. GPU times vary less, so a GPU run has fewer rounds."""
        return self.sized(usual if self.device == "cpu" else max(3, usual // 3), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plot of a table, with one curve over ``x`` for each variant.

    Attributes:
        table: The name of the table.
        x_label: The label of the horizontal axis, with its unit.
        y_label: The label of the vertical axis. ``{unit}`` in the label is replaced by a unit that suits the
            values.
    """

    table: str
    x_label: str
    y_label: str


class Section:
    """A group of related comparisons in the report. Each subclass defines one group.

    Attributes:
        key: The name of the section in commands, files and documentation markers.
        threads: The number of threads that torch uses on the CPU. 0 lets torch choose.
        timing: A description of the clock that is used on the CPU.
    """

    key: str = ""
    threads: int = 1
    timing: str = "CPU time of one thread"
    plots: tuple[Plot, ...] = ()

    def comparisons(self, setting: Setting) -> Iterable[Comparison]:
        """Yield the comparisons one at a time, because a single comparison can need a lot of memory."""
        raise NotImplementedError


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads to ``count`` inside a ``with`` block. A count of 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
