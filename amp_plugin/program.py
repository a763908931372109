"""What a command is to run as the main program: a file or a module."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What is to run as the main program.

    Attributes:
        name: How the user named it.
        file: Its file; of a package its ``__main__.py``.
        module: Its module's name, where it was named so.
    """

    name: str
    file: Path
    module: str | None = None

    @classmethod
    def of_file(cls, name: str, *, command: str) -> Program:
        """Take a Python file.

        Args:
            name: Its path.
            command: Of amp-plugin, to show how it takes a module.

        Raises:
            ValueError: There is none of this name.
        """
        if Path(name).is_file():
            return cls(name=name, file=Path(name))
        kind = "is a folder" if Path(name).is_dir() else "does not exist"
        hint = f"; for a module write: {command} -m {name}" if _place_of(name) else ""
        msg = f"file {name!r} {kind}{hint}"
        raise ValueError(msg)

    @classmethod
    def of_module(cls, name: str) -> Program:
        """Take a module or a package, found as by ``python -m`` from the present folder.

        Args:
            name: With dots.

        Raises:
            ValueError: There is none of this name.
        """
        place = _place_of(name)
        if place is None:
            msg = f"module {name!r} is not found from {Path.cwd()} or among the installed packages"
            raise ValueError(msg)
        return cls(name=name, file=Path(place), module=name)


def program_named(name: str, *, as_module: bool, command: str) -> Program:
    """Take a module where one is asked for, else a Python file.

    Args:
        name: Of the module, or the file's path.
        as_module: Whether ``-m`` was given.
        command: Of amp-plugin.

    Raises:
        ValueError: There is none of this name.
    """
    return Program.of_module(name) if as_module else Program.of_file(name, command=command)


def _place_of(module: str) -> str | None:
    """Return the file that ``python -m module`` would run; None if there is none."""
    path = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    finally:
        sys.path[:] = path
    return None if spec is None else spec.origin
