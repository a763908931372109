"""Runs a Python file or module unchanged, as the main program, inside a context manager."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from io import open_code
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, cast

from amp_plugin.patches import replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python file or module to run as the main program."""

    name: str  # as the user gave it
    file: Path  # the __main__.py of a package
    module: str | None = None  # None if the user gave a file


def program_named(name: str, *, as_module: bool) -> Program:
    """Return the program that the user named: a Python file, or a module as for ``python -m``."""
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
    """Return the path of the file that ``python -m module`` would run, or None."""
    with replaced(sys, "path", [str(Path.cwd()), *sys.path]), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        return None if spec is None else spec.origin
    return None


_PARSERS: Final = {"argparse", "getopt", "importlib", "optparse", "runpy"}
# Packages that never read the command-line arguments of a program.
_QUIET: Final = {"amp_plugin", "numpy", "torch", "torchvision"}


def reads_arguments(name: str) -> bool:
    """Return False if neither a Python file nor its imported modules can read command-line arguments."""
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


def mentions(name: str, option: str) -> bool:
    """Return True if a Python file contains an option such as ``--steps`` as a string."""
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f'"{option}"' in text or f"'{option}'" in text


def run_program(
    program: Program,
    arguments: Sequence[str],
    around: AbstractContextManager[object],
    *,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> tuple[int, bool]:
    """Run a file or module as the main program. Print an error of the program as Python would.

    ``__main__``, ``sys.argv`` and ``sys.path`` are not restored here, because threads and atexit handlers of
    the program run after its last line. :func:`main_restored` restores them.

    Returns:
        The exit code of the program, and whether it ended with an error.
    """
    code, failed = 0, False
    try:
        with around:
            _run_main(program, arguments)
    except SystemExit as stop:
        code = int(stop.code is not None)
        if isinstance(stop.code, int):
            code = stop.code
        elif stop.code is not None:
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - of the program
        code, failed = 130 if isinstance(error, KeyboardInterrupt) else 1, True
        if not isinstance(error, expected):
            _print_error(error, program.file.absolute())
    return code, failed


@contextmanager
def main_restored() -> Iterator[None]:
    """Restore ``__main__``, ``sys.argv`` and ``sys.path`` at the end of the block."""
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


def _run_main(program: Program, arguments: Sequence[str]) -> None:
    """Run a program as ``python FILE`` or ``python -m MODULE`` would."""
    if program.module is None:
        _enter_path(str(program.file.resolve().parent))
        file = str(program.file.absolute())
        code, spec, package = _code_of(file), None, None
    else:
        _enter_path(str(Path.cwd()))
        spec, code = _module_code(program.module)
        file, package = str(spec.origin), spec.parent
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", file) if spec is None else spec.loader
    vars(main).update(
        __file__=file, __spec__=spec, __package__=package, __loader__=loader, __builtins__=builtins
    )
    sys.modules["__main__"] = main
    sys.argv = [program.name if spec is None else file, *arguments]
    exec(code, vars(main))  # noqa: S102 - the program that was asked for


def _enter_path(folder: str) -> None:
    """Put a folder at the front of ``sys.path``, replacing the entry for amp_plugin's own command."""
    ours = {"", str(Path.cwd()), str(Path(sys.argv[0] or ".").resolve().parent)}
    is_ours = bool(sys.path) and sys.path[0] in ours and not getattr(sys.flags, "safe_path", False)
    sys.path[: int(is_ours)] = [folder]


def _code_of(file: str) -> CodeType:
    """Return the code of a Python file, a compiled file, or an archive that contains a ``__main__``."""
    if zipfile.is_zipfile(file):
        sys.path[:1] = [file]
        return _module_code("__main__")[1]
    if file.endswith(".pyc"):
        return cast("CodeType", SourcelessFileLoader("__main__", file).get_code("__main__"))
    with open_code(file) as source:
        return compile(source.read(), file, "exec", dont_inherit=True)


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return the module spec and the code that ``python -m`` would run."""
    spec = PathFinder.find_spec(name) if name == "__main__" else importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = getattr(spec and spec.loader, "get_code", lambda _: None)(name)
    if spec is None or code is None:
        msg = f"no module {name!r} can be run here"
        raise ImportError(msg)
    return spec, code


def _print_error(error: BaseException, script: Path) -> None:
    """Print an error with ``sys.excepthook``, in a traceback that begins at the program's first frame."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    hook = sys.excepthook if getattr(sys.excepthook, "__module__", "") != "typer.main" else sys.__excepthook__
    hook(type(error), error.with_traceback(frames), frames)
