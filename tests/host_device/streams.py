"""Streams, events and graphs of the device in host memory, in the form that ``torch.cuda`` exposes."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, ClassVar

import torch


def index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a device. The default is the current device."""
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


class HostStream:
    """A stream. Its work runs immediately, unless work is delayed."""

    _numbers = itertools.count(1)
    _by_number: ClassVar[dict[tuple[int, int], HostStream]] = {}

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0) -> None:
        self._take(index_of(device), next(self._numbers))

    def _take(self, index: int, number: int) -> None:
        self.device = torch.device("cuda", index)
        self.cuda_stream = self.stream_id = number
        self._by_number[index, number] = self

    @classmethod
    def of(cls, index: int, number: int) -> HostStream:
        if (index, number) not in cls._by_number:
            cls.__new__(cls)._take(index, number)
        return cls._by_number[index, number]

    @property
    def _place(self) -> tuple[int, int]:
        return self.device.index, self.stream_id

    def wait_stream(self, stream: HostStream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: HostEvent) -> None:
        torch.ops.host_device.let_wait(*self._place, *event.moment)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.record_event().synchronize()


class HostEvent:
    """An event: a position in the work of a stream, and a time on the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moment = (0, 0, 0)

    def record(self, stream: HostStream | None = None) -> None:
        place = (stream or current_stream())._place
        self.moment = (*place, torch.ops.host_device.now_on(*place))
        self.happened = time.perf_counter() * 1e3

    def wait(self, stream: HostStream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return torch.ops.host_device.has_come(*self.moment)

    def elapsed_time(self, end: HostEvent) -> float:
        frozen = os.environ.get("HOST_DEVICE_FAULT") == "the clock stands still"
        return 0.0 if frozen else end.happened - self.happened

    def synchronize(self) -> None:
        torch.ops.host_device.synchronize_with(*self.moment)


def current_stream(device: torch.device | str | int | None = None) -> HostStream:
    index = index_of(device)
    return HostStream.of(index, torch.ops.host_device.current_stream(index))


def default_stream(device: torch.device | str | int | None = None) -> HostStream:
    return HostStream.of(index_of(device), 0)


def set_stream(stream: HostStream) -> None:
    torch.ops.host_device.set_stream(*stream._place)
    torch.cuda.set_device(stream.device)


class HostGraph:
    """A CUDA graph, recorded and replayed by ``graph.cpp``."""

    _number: int | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._number = torch.ops.host_device.capture_begin()

    def capture_end(self) -> None:
        torch.ops.host_device.capture_end()

    def replay(self) -> None:
        torch.ops.host_device.replay(self._number)

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        if self._number is not None:
            torch.ops.host_device.release(self._number)
        self._number = None

    def __del__(self) -> None:
        self.reset()
