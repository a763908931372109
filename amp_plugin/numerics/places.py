"""Where an op was called: the line of the program, and for a backward pass the op of the forward pass."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_TYPED = ("<stdin", "<ipython-input-")
_INSTALLED = ("site-packages", "dist-packages")

_MACHINERY, _LIBRARY, _PROGRAM = range(3)
_MOST = 500_000  # sites kept; a node this old has long run its backward


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program.

    Attributes:
        file: its path.
        line: counted from 1.
        function: name of the function it is in.
    """

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The source of the line, without the blanks around it; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        if cell := _cell(self.file):
            return f"{cell}, line {self.line} in {self.function}"
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class CalledFrom:
    """Where an op was called, innermost first.

    Attributes:
        code: code object and line outside torch and this package, perhaps in an installed library.
        program: the same outside installed libraries; equal to ``code`` in most programs.
    """

    code: tuple[CodeType, int] | None = None
    program: tuple[CodeType, int] | None = None

    @property
    def place(self) -> Place | None:
        """The line that called the op."""
        return _place(self.code)

    @property
    def caller(self) -> Place | None:
        """The line of the program that led there, if the op was called in an installed library."""
        return None if self.program == self.code else _place(self.program)


def called_from(frame: FrameType | None = None) -> CalledFrom:
    """Return the line that runs now, outside torch and this package; reads no source.

    Args:
        frame: where to begin; default: the caller.
    """
    code, frame = None, frame or sys._getframe(1)
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind is not _MACHINERY:
            here = (frame.f_code, frame.f_lineno)
            code = code or here
            if kind is _PROGRAM:
                return CalledFrom(code, here)
        frame = frame.f_back
    return CalledFrom(code, None)


def _place(found: tuple[CodeType, int] | None) -> Place | None:
    return None if found is None else Place(found[0].co_filename, found[1], found[0].co_name)


def _cell(file: str) -> str | None:
    """Return what IPython calls a cell of a notebook, such as ``Cell In[3]``; None for a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    name_of = getattr(shell and shell.compile, "format_code_name", None)  # of IPython 8 and newer
    name = name_of(file) if name_of else None
    return " ".join(name) if name else None


@cache
def _kind(file: str) -> int:
    if file.startswith((_TORCH, _OURS)) or (file.startswith("<") and not file.startswith(_TYPED)):
        return _MACHINERY
    if any(part in _INSTALLED for part in Path(file).parts):
        return _LIBRARY
    return _MACHINERY if file.startswith(_STANDARD) else _PROGRAM


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op ran.

    Attributes:
        op: full name.
        module: path of the module; empty outside of modules.
        where: the line that called it.
        in_block: whether an autocast block was open around it.
    """

    op: str
    module: str
    where: CalledFrom
    in_block: bool = False


def in_autocast_block() -> bool:
    """Return whether this thread is in an autocast block; inside an op autocast's own flag is off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def runs_backward(node: Any) -> bool:
    """Return whether a backward pass runs an op; what checkpoint computes again belongs to the forward pass.

    Args:
        node: the autograd node that runs it; None if there is none.
    """
    return node is not None and not torch.is_grad_enabled()


class ForwardSites:
    """The site of each op that autograd recorded, by the number that its node got.

    Numbers are counted in each thread, so that of another thread's node may be ambiguous: then none is found.
    """

    def __init__(self) -> None:
        self._sites: dict[tuple[int, int], Site] = {}  # (thread, number) -> site
        self._before: dict[int, int] = {}  # thread -> the last number that is not ours to name

    def open(self) -> None:
        """Start with the nodes that this thread makes from now on."""
        self._before[threading.get_ident()] = torch._C._autograd._get_sequence_nr() - 1

    def record(self, op: str, module: str) -> None:
        """Record the op that runs, if autograd has just made a node for it."""
        number = torch._C._autograd._get_sequence_nr() - 1
        key = (threading.get_ident(), number)
        if key in self._sites or number <= self._before.setdefault(key[0], number):
            return
        self._sites[key] = Site(op, module, called_from(), in_autocast_block())
        if len(self._sites) > _MOST:
            for old in list(self._sites)[: _MOST // 2]:
                del self._sites[old]

    def latest(self, site: Site) -> Site | None:
        """Return what was recorded of the op that runs; None if autograd has made no node for it.

        Args:
            site: where it runs.
        """
        noted = self._sites.get((threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1))
        return noted if noted == site else None

    def of(self, node: Any) -> Site | None:
        """Return where the forward op of a node ran; None if that is not known.

        Args:
            node: an autograd node, or None.
        """
        if node is None:
            return None
        number = node._sequence_nr()
        found = [self._sites[thread, number] for thread in self._before if (thread, number) in self._sites]
        return found[0] if len(found) == 1 else None
