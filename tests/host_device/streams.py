"""Streams, events and graphs of the device made of host memory: what is put on a stream has run at once."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, ClassVar

import torch


def index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a device; by default of the current one."""
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


class HostStream:
    """A stream; what is put on it has run when the call returns."""

    _numbers = itertools.count(1)
    _defaults: ClassVar[dict[int, HostStream]] = {}

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.cuda_stream = next(self._numbers)

    @classmethod
    def default(cls, index: int) -> HostStream:
        if index not in cls._defaults:
            cls._defaults[index] = cls(index)
            cls._defaults[index].cuda_stream = 0
        return cls._defaults[index]

    def wait_stream(self, stream: HostStream) -> None:
        """Return: it has run."""

    def wait_event(self, event: HostEvent) -> None:
        """Return: it has happened."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()

    def synchronize(self) -> None:
        torch.ops.host_device.synchronize()


class HostEvent:
    """An event; it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: HostStream | None = None) -> None:
        self.happened = time.perf_counter() * 1e3

    def wait(self, stream: HostStream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return end.happened - self.happened

    def synchronize(self) -> None:
        torch.ops.host_device.synchronize()


_current = threading.local()


def current_stream(device: torch.device | str | int | None = None) -> HostStream:
    index = index_of(device)
    return getattr(_current, f"of_{index}", None) or HostStream.default(index)


def set_stream(stream: HostStream) -> None:
    setattr(_current, f"of_{stream.device.index}", stream)
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
