"""The line of a program that an op was called from."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_TYPED = ("<stdin", "<ipython-input-")
_INSTALLED = ("site-packages", "dist-packages")

_MACHINERY, _LIBRARY, _PROGRAM = range(3)


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
