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
    """The device of a run, and whether the sizes of the smoke test are used.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        tiny: Whether sizes and rounds are so small that they only show that a comparison runs.
    """

    device: str = "cpu"
    tiny: bool = False

    def __post_init__(self) -> None:
        if self.device not in {"cpu", "cuda"}:
            msg = f"benchmarks run on 'cpu' and 'cuda', not on {self.device!r}"
            raise ValueError(msg)

    @property
    def host_clock(self) -> Clock:
        """The clock for work whose time is spent in launching ops."""
        return thread_time if self.device == "cpu" else synchronised_time

    @property
    def memory_clock(self) -> Clock:
        """The clock for work that is limited by memory bandwidth."""
        return wall_time if self.device == "cpu" else event_time

    @property
    def device_clock(self) -> Clock:
        """The clock for the device's work alone, without the time to launch it."""
        return wall_time if self.device == "cpu" else device_time

    def sized(self, usual: T, tiny: T) -> T:
        """Return the usual value, or in a smoke test the tiny one."""
        return tiny if self.tiny else usual

    def rounds(self, usual: int) -> int:
        """Return the number of rounds of a comparison. On a GPU there are fewer, because times vary less."""
        return self.sized(usual if self.device == "cpu" else max(3, usual // 3), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plot of a table: each label is a curve over ``x``.

    Attributes:
        table: The name of the table.
        x_label: The label of the axis, with its unit.
        y_label: The label of the axis. ``{unit}`` in it is replaced by a unit that suits the values.
    """

    table: str
    x_label: str
    y_label: str


class Section:
    """Comparisons that belong together in the report. Subclasses make them.

    Attributes:
        key: The name of the section in commands, files and markers.
        threads: The number of torch's threads on the CPU. 0 lets torch choose.
        timing: A text on how times are taken on the CPU.
    """

    key: str = ""
    threads: int = 1
    timing: str = "CPU time of one thread"
    plots: tuple[Plot, ...] = ()

    def comparisons(self, setting: Setting) -> Iterable[Comparison]:
        """Yield the comparisons one at a time, because each may need much memory."""
        raise NotImplementedError


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch ``count`` threads. With 0 torch chooses."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
