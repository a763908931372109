"""Where an op was called: the line of the program, and for a backward pass the op of the forward pass."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_TYPED = ("<stdin", "<ipython-input-")
_INSTALLED = ("site-packages", "dist-packages")

# Functions around an op that a dispatch mode is told of.
_AROUND_OPS = (_OURS, str(Path(_TORCH, "_dynamo")), str(Path(_TORCH, "_compile.py")))

_MACHINERY, _LIBRARY, _PROGRAM = range(3)
_MOST = 500_000  # sites kept; a node this old has long run its backward


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str  # its path
    line: int  # counted from 1
    function: str  # name of the function it is in

    @property
    def text(self) -> str:
        """The source of the line, without the blanks around it; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line} in {self.function}"


def called_from(frame: FrameType | None = None) -> tuple[Place | None, Place | None]:
    """Return the line of a program or library that runs now, and the program's that led to a library's."""
    return _innermost(traceback.walk_stack(frame or sys._getframe(1)))


def raised_from(trace: TracebackType | None) -> tuple[Place | None, Place | None]:
    """Return the line of a program or library that raised an error, and the program's that led there."""
    return _innermost(reversed([*traceback.walk_tb(trace)]))


def is_called_by_engine() -> bool:
    """Return True if autograd's engine calls the running op from C++: in a node of its own, or for DDP.

    A node or a hook that is written in Python has a frame between the engine and the op.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    caller = next((code for code in frames if not code.co_filename.startswith(_AROUND_OPS)), None)
    return caller is None or caller.co_name == "_engine_run_backward"  # None: a thread of the engine


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> tuple[Place | None, Place | None]:
    inner = None
    for frame, line in frames:
        kind = _kind(frame.f_code.co_filename)
        if kind is not _MACHINERY:
            here = _place(frame.f_code.co_filename, line, frame.f_code.co_name)
            if kind is _PROGRAM:
                return (inner, here) if inner else (here, None)
            inner = inner or here
    return inner, None


_place = cache(Place)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def place_in_trace(text: str) -> Place | None:
    """Return the last line of a printed stack that is outside torch and this package."""
    frames = [match.groups() for match in _FRAME.finditer(text)]
    outside = [frame for frame in frames if _kind(frame[0]) is not _MACHINERY]
    return _place(outside[-1][0], int(outside[-1][1]), outside[-1][2]) if outside else None


@cache
def _kind(file: str) -> int:
    if file.startswith((_TORCH, _OURS)) or (file.startswith("<") and not file.startswith(_TYPED)):
        return _MACHINERY
    if any(part in _INSTALLED for part in Path(file).parts):
        return _LIBRARY
    return _MACHINERY if file.startswith(_STANDARD) else _PROGRAM


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op ran."""

    op: str  # full name
    module: str  # path of the module; empty outside of modules
    place: Place | None  # the line that called it, outside torch and this package; None if there is none
    caller: Place | None  # the line of the program that led there, if place is in an installed library
    in_block: bool  # whether an autocast block was open around it

    @classmethod
    def here(cls, op: str, module: str) -> Site:
        """Return the site of an op that runs now."""
        depth = torch.autocast_increment_nesting()  # inside an op autocast's own flag is off
        torch.autocast_decrement_nesting()
        return cls(op, module, *called_from(), depth > 1)


class ForwardSites:
    """The site of each op that autograd recorded, by its thread and the number of its node there."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, int], Site] = {}  # (thread, number) -> site
        # thread -> the last number that is not ours to name, of this one now
        self._before: dict[int, int] = dict([self._latest()])

    def record(self, op: str, module: str) -> None:
        """Record the op that runs, if autograd has just made a node for it."""
        key = self._latest()
        if key in self._sites or key[1] <= self._before.setdefault(*key):
            return
        self._sites[key] = Site.here(op, module)
        if len(self._sites) > _MOST:
            for old in list(self._sites)[: _MOST // 2]:
                del self._sites[old]

    def of(self, node: Any) -> Site | None:
        """Return where the forward op of an autograd node, or of None, ran; None if that is not known."""
        if node is None:
            return None
        number = node._sequence_nr()
        found = [self._sites[thread, number] for thread in self._before if (thread, number) in self._sites]
        return found[0] if len(found) == 1 else None  # which thread's node it is cannot be told

    @staticmethod
    def _latest() -> tuple[int, int]:
        """Return this thread, and the number of the node that it made last."""
        return threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1
