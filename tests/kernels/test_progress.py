"""The line that shows that something runs."""

from __future__ import annotations

import io
import re
import time

import pytest

from amp_plugin.kernels.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_file_the_line_is_written_once() -> None:
    stream = io.StringIO()
    with Progress("compiling ...", stream, interval=0.01) as progress:
        time.sleep(0.05)
    assert stream.getvalue() == f"compiling ... {progress.seconds:.1f} s\n"
    assert progress.seconds >= 0.05


def test_on_a_terminal_the_seconds_are_counted() -> None:
    stream = Terminal()
    with Progress("compiling ...", stream, interval=0.01):
        time.sleep(0.1)
    written = stream.getvalue().split("\r")
    assert len(written) > 3
    assert written[1] == "compiling ... 0 s"
    assert re.fullmatch(r"compiling \.\.\. 0\.\d s\n", written[-1])


def test_a_failure_ends_the_line() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="broken"), Progress("compiling ...", stream):
        raise RuntimeError("broken")
    assert re.fullmatch(r"compiling \.\.\. failed after 0\.\d s\n", stream.getvalue())
