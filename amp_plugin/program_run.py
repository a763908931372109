"""Run a program unchanged, with something open around it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from amp_plugin.casting.dispatcher import set_default_rules
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_files import TABLES
from amp_plugin.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """A program that has run.

    Attributes:
        code: its exit code.
        failed: whether it ended in an error, which has been printed.
    """

    code: int
    failed: bool


def run_program(
    program: Program,
    arguments: Sequence[str],
    around: AbstractContextManager[object],
    *,
    expected: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> ProgramRun:
    """Run a file or a module as the main program.

    While it runs, ``torch.autocast`` blocks follow this package's default rules, which equal torch's. An
    error of the script is printed as Python prints it.

    Args:
        program: a file or a module.
        arguments: its arguments.
        around: entered before the script, left after it.
        expected: errors that need no printing; the exit code is 1 all the same.
    """
    code, failed, argv, path = 0, False, sys.argv, list(sys.path)
    folder = program.file.resolve().parent if program.module is None else Path.cwd()
    sys.argv, sys.path[:0] = [str(program.file), *arguments], [str(folder)]
    for device_type in TABLES:
        if torch.amp.is_autocast_available(device_type):
            set_default_rules(OpRules.default(device_type))
    try:
        with around:
            if program.module is None:
                runpy.run_path(str(program.file.absolute()), run_name="__main__")
            else:
                runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - the script's, KeyboardInterrupt too
        code, failed = 130 if isinstance(error, KeyboardInterrupt) else 1, True
        if not isinstance(error, expected):
            _print_error(error, program.file.absolute())
    finally:
        set_default_rules(None)
        sys.argv, sys.path[:] = argv, path
    return ProgramRun(code=code, failed=failed)


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
