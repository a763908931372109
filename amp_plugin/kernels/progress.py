"""One line that shows that something runs, and for how long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self


class Progress:
    """A line such as ``compiling ... 12.3 s``; on a terminal the seconds are counted while it runs.

    Used as a context manager; an error within ends the line with ``failed after 3.1 s``.

    Args:
        text: What runs.
        stream: Where the line is written, such as ``sys.stderr``.
        interval: Seconds between two updates on a terminal.

    Attributes:
        seconds: How long it took; 0.0 before it ended.
    """

    def __init__(self, text: str, stream: TextIO, *, interval: float = 1.0) -> None:
        self.seconds = 0.0
        self._text, self._stream, self._interval = text, stream, interval
        self._ended = threading.Event()
        self._clock: threading.Thread | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        """Write the text; start the clock if somebody watches."""
        self._started = time.perf_counter()
        self._write(self._text)
        if self._stream.isatty():
            self._clock = threading.Thread(target=self._count, daemon=True)
            self._clock.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the time and end the line."""
        self._ended.set()
        if self._clock is not None:
            self._clock.join()
            self._write(f"\r{self._text}")
        self.seconds = time.perf_counter() - self._started
        self._write(f" {'failed after ' if kind else ''}{self.seconds:.1f} s\n")

    def _count(self) -> None:
        while not self._ended.wait(self._interval):
            self._write(f"\r{self._text} {time.perf_counter() - self._started:.0f} s")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
