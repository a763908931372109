"""Find the line of the program that called an op or, in a backward pass, its forward op."""

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

# On the call stack, functions in these files lie between the program's code and the dispatch mode.
_AROUND_OPS = (_OURS, str(Path(_TORCH, "_dynamo")), str(Path(_TORCH, "_compile.py")))

_MACHINERY, _LIBRARY, _PROGRAM = range(3)
# When more than this many call sites are stored, the older half is dropped.
# The dropped call sites belong to old autograd nodes, which are no longer needed.
_MOST = 500_000


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str  # the path of the file
    line: int  # the line number, from 1
    function: str  # the name of the function

    @property
    def text(self) -> str:
        """The source code of the line, stripped of outer whitespace, or ``""`` if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line} in {self.function}"


def called_from(frame: FrameType | None = None) -> tuple[Place | None, Place | None]:
    """Return the innermost line of the call stack that is outside torch and this package.

    If this line is in an installed library, also return the line of the program that called the library.
    """
    return _innermost(traceback.walk_stack(frame or sys._getframe(1)))


def raised_from(trace: TracebackType | None) -> tuple[Place | None, Place | None]:
    """Return the innermost line of a traceback that is outside torch and this package.

    If this line is in an installed library, also return the line of the program that called the library.
    """
    return _innermost(reversed([*traceback.walk_tb(trace)]))


def is_called_by_engine() -> bool:
    """Return whether the running op was called by autograd's engine from C++, and not by Python code.

    If a node or hook written in Python calls the op, there is a Python frame between the engine and the op.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    caller = next((code for code in frames if not code.co_filename.startswith(_AROUND_OPS)), None)
    # Threads of the autograd engine have no Python frames of the user's program.
    return caller is None or caller.co_name == "_engine_run_backward"


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
    """Return the last line of a textual stack trace that is outside torch and this package.

    Return None if there is no such line.
    """
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
    """The place where an op was called."""

    op: str  # the full name of the op
    module: str  # the path of the module; empty outside modules
    place: Place | None  # the line outside torch and this package that called the op; None if unknown
    caller: Place | None  # the line of the program that called the library, if place is in a library
    in_block: bool  # whether an autocast block was open

    @classmethod
    def here(cls, op: str, module: str) -> Site:
        """Return the place in the source code where the running op was called."""
        # torch.is_autocast_enabled() is always False inside an op, so the nesting depth is read instead.
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return cls(op, module, *called_from(), depth > 1)


class ForwardSites:
    """Maps the thread and autograd node of each recorded op to the op's call site."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, int], Site] = {}  # keys: (thread, sequence number of a node)
        # Maps each thread to the sequence number of its newest autograd node when recording began.
        self._before: dict[int, int] = dict([self._latest()])

    def record(self, op: str, module: str) -> None:
        """Record the call site of the running op, if autograd has just made a node for it."""
        key = self._latest()
        if key in self._sites or key[1] <= self._before.setdefault(*key):
            return
        self._sites[key] = Site.here(op, module)
        if len(self._sites) > _MOST:
            for old in list(self._sites)[: _MOST // 2]:
                del self._sites[old]

    def of(self, node: Any) -> Site | None:
        """Return the call site of the forward op of an autograd node, or None if the site is not known."""
        if node is None:
            return None
        number = node._sequence_nr()
        found = [self._sites[thread, number] for thread in self._before if (thread, number) in self._sites]
        # If several threads made an autograd node with this sequence number, the call site is ambiguous.
        return found[0] if len(found) == 1 else None

    @staticmethod
    def _latest() -> tuple[int, int]:
        """Return the id of this thread, and the sequence number of the last autograd node that it made."""
        return threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1
