"""A program that a command runs unchanged, with something open around it: a file or a module."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amp_plugin.casting.bound_rules import ours_by_default
from amp_plugin.patches import replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What is to run as the main program."""

    name: str  # as the user wrote it
    file: Path  # of a package its __main__.py
    module: str | None = None  # None if a file was named


def program_named(name: str, *, as_module: bool) -> Program:
    """Return a Python file, or a module or package as ``python -m`` finds it from the present folder."""
    if not as_module and Path(name).is_file():
        return Program(name=name, file=Path(name))
    place = _place_of(name)
    if as_module and place is not None:
        return Program(name=name, file=Path(place), module=name)
    if as_module:
        msg = f"module {name!r} is not found from {Path.cwd()} or among the installed packages"
    else:
        kind = "is a folder" if Path(name).is_dir() else "does not exist"
        msg = f"file {name!r} {kind}" + (f"; for a module write: -m {name}" if place else "")
    raise ValueError(msg)


def _place_of(module: str) -> str | None:
    """Return the file that ``python -m module`` would run; None if there is none."""
    with replaced(sys, "path", [str(Path.cwd()), *sys.path]), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        return None if spec is None else spec.origin
    return None


_PARSERS: Final = {"argparse", "getopt", "importlib", "optparse", "runpy"}
_QUIET: Final = {"amp_plugin", "numpy", "torch", "torchvision"}  # packages that read no program's arguments


def reads_arguments(name: str) -> bool:
    """Return False if a file of Python cannot read its arguments: nothing in it and what it imports does."""
    try:
        nodes = [*ast.walk(ast.parse(Path(name).read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return True
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in imported}
    words = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
    words |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    silent = (sys.stdlib_module_names - _PARSERS) | _QUIET
    return bool(words & {"argv", "orig_argv", "__import__", "exec"}) or not roots <= silent


def run_program(
    program: Program,
    arguments: Sequence[str],
    around: AbstractContextManager[object],
    *,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> tuple[int, bool]:
    """Run a file or a module as the main program, under our rules; print its error as Python prints it.

    Returns its exit code, and whether it ended in an error.
    """
    code, failed, argv, path = 0, False, sys.argv, list(sys.path)
    folder = program.file.resolve().parent if program.module is None else Path.cwd()
    sys.argv, sys.path[:0] = [str(program.file), *arguments], [str(folder)]
    try:
        with ours_by_default(), around:
            if program.module is None:
                runpy.run_path(str(program.file.absolute()), run_name="__main__")
            else:
                runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = int(stop.code is not None)
        if isinstance(stop.code, int):
            code = stop.code
        elif stop.code is not None:
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - the script's, KeyboardInterrupt too
        code, failed = 130 if isinstance(error, KeyboardInterrupt) else 1, True
        if not isinstance(error, expected):
            _print_error(error, program.file.absolute())
    finally:
        sys.argv, sys.path[:] = argv, path
    return code, failed


def _print_error(error: BaseException, script: Path) -> None:
    """Print an error from the script's first frame on, by the script's own excepthook if set."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    hook = sys.excepthook if getattr(sys.excepthook, "__module__", "") != "typer.main" else sys.__excepthook__
    hook(type(error), error.with_traceback(frames), frames)
