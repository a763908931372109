"""Where a comparison runs, and how large."""

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
    """The device of a run, and whether sizes are those of the smoke test.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        tiny: Sizes and rounds that only show that a comparison runs.
    """

    device: str = "cpu"
    tiny: bool = False

    def __post_init__(self) -> None:
        if self.device not in {"cpu", "cuda"}:
            msg = f"benchmarks run on 'cpu' and 'cuda', not on {self.device!r}"
            raise ValueError(msg)

    @property
    def host_clock(self) -> Clock:
        """For work that starting ops decides."""
        return thread_time if self.device == "cpu" else synchronised_time

    @property
    def memory_clock(self) -> Clock:
        """For work that memory bandwidth decides."""
        return wall_time if self.device == "cpu" else event_time

    @property
    def device_clock(self) -> Clock:
        """Times the work of the device alone, without the time to start it."""
        return wall_time if self.device == "cpu" else device_time

    def sized(self, usual: T, tiny: T) -> T:
        """Choose between the usual and the smoke test's value."""
        return tiny if self.tiny else usual

    def rounds(self, usual: int) -> int:
        """Rounds of a comparison; fewer on a GPU, whose times vary less."""
        return self.sized(usual if self.device == "cpu" else max(3, usual // 3), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A figure of a table: each label of it over ``x``.

    Attributes:
        table: Which table is drawn.
        x_label: With the unit.
        y_label: With the unit ``{unit}``, filled in for the size of the values.
    """

    table: str
    x_label: str
    y_label: str


class Section:
    """Comparisons that belong together in the report; subclasses make them.

    Attributes:
        key: Its name in commands, files and markers.
        threads: Of torch on the CPU; 0 for as many as torch chooses.
        timing: How times are taken on the CPU, in words.
    """

    key: str = ""
    threads: int = 1
    timing: str = "CPU time of one thread"
    plots: tuple[Plot, ...] = ()

    def comparisons(self, setting: Setting) -> Iterable[Comparison]:
        """Yield the comparisons, one at a time: each may hold much memory."""
        raise NotImplementedError


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch ``count`` threads; 0 leaves its choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
