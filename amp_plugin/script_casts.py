"""Run a script unchanged and list the casts that autocast makes in it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from amp_plugin.casting.cast_log import CastLog, log_casts
from amp_plugin.casting.casts import Cast, CastTotals
from amp_plugin.casting.rule_sets import set_default_rules
from amp_plugin.casting.rules import TABLES, OpRules

_KEYS: Final[dict[str, Callable[[Cast], dict[str, str]]]] = {
    "cast": lambda cast: {
        "module": cast.module,
        "op": cast.op,
        "argument": cast.argument,
        "kind": cast.kind,
        "before": str(cast.before).removeprefix("torch."),
        "after": str(cast.after).removeprefix("torch."),
    },
    "module": lambda cast: {"module": cast.module},
    "op": lambda cast: {"op": cast.op},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """A script that has run.

    Attributes:
        log: The closed log of its casts.
        code: Its exit code.
        failed: Whether it ended in an error, which has been printed.
    """

    log: CastLog
    code: int
    failed: bool


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
    def of_file(cls, name: str) -> Program:
        """Take a Python file.

        Raises:
            ValueError: There is none of this name.
        """
        if Path(name).is_file():
            return cls(name=name, file=Path(name))
        kind = "is a folder" if Path(name).is_dir() else "does not exist"
        hint = "; for a module write: casts -m " + name if _place_of(name) else ""
        msg = f"file {name!r} {kind}{hint}"
        raise ValueError(msg)

    @classmethod
    def of_module(cls, name: str) -> Program:
        """Take a module or a package, found as by ``python -m`` from the present folder.

        Raises:
            ValueError: There is none of this name.
        """
        place = _place_of(name)
        if place is None:
            msg = f"module {name!r} is not found from {Path.cwd()} or among the installed packages"
            raise ValueError(msg)
        return cls(name=name, file=Path(place), module=name)


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


def run_logged(program: Program, arguments: Sequence[str]) -> LoggedRun:
    """Run a program with a cast log open.

    The casts of ``torch.autocast`` blocks are listed too: while the script runs, those blocks follow this
    package's default rules, which equal torch's. An error of the script is printed as Python prints it.

    Args:
        program: A file or a module.
        arguments: Its arguments.

    Raises:
        RuntimeError: The native core is not loaded.
    """
    log, code, failed, argv, path = log_casts(), 0, False, sys.argv, list(sys.path)
    folder = program.file.resolve().parent if program.module is None else Path.cwd()
    sys.argv, sys.path[:0] = [str(program.file), *arguments], [str(folder)]
    for device_type in TABLES:
        if torch.amp.is_autocast_available(device_type):
            set_default_rules(OpRules.default(device_type))
    try:
        with log:
            if program.module is None:
                runpy.run_path(str(program.file.absolute()), run_name="__main__")
            else:
                runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - the script's, KeyboardInterrupt too
        code, failed = 130 if isinstance(error, KeyboardInterrupt) else 1, True
        _print_error(error, program.file.absolute())
    finally:
        set_default_rules(None)
        sys.argv, sys.path[:] = argv, path
    return LoggedRun(log=log, code=code, failed=failed)


def _print_error(error: BaseException, script: Path) -> None:
    """Print an error from the script's first frame on, by the script's own excepthook if set."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    hook = sys.excepthook if getattr(sys.excepthook, "__module__", "") != "typer.main" else sys.__excepthook__
    hook(type(error), error.with_traceback(frames), frames)


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.code, int) or stop.code is None:
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def rows(log: CastLog, by: str) -> list[dict[str, Any]]:
    """Return the casts of a log, added up in groups, most bytes first.

    Args:
        log: A closed log.
        by: ``"cast"``, ``"module"`` or ``"op"``: what the casts of a group have in common.
    """
    groups: dict[tuple[str, ...], list[Cast]] = {}
    for cast in log.records():
        groups.setdefault(tuple(_KEYS[by](cast).values()), []).append(cast)
    added = [_KEYS[by](casts[0]) | asdict(CastTotals.of(casts)) for casts in groups.values()]
    return sorted(added, key=lambda row: -int(row["bytes"]))
