"""Run a script unchanged and list the casts that autocast makes in it."""

from __future__ import annotations

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


def run_logged(script: Path, arguments: Sequence[str]) -> LoggedRun:
    """Run ``script`` as the main program with a cast log open.

    The casts of ``torch.autocast`` blocks are listed too: while the script runs, those blocks follow this
    package's default rules, which equal torch's. An error of the script is printed as Python prints it.

    Args:
        script: A Python file.
        arguments: Its arguments.

    Raises:
        RuntimeError: The native core is not loaded.
    """
    log, code, failed, argv, path = log_casts(), 0, False, sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    for device_type in TABLES:
        if torch.amp.is_autocast_available(device_type):
            set_default_rules(OpRules.default(device_type))
    try:
        with log:
            runpy.run_path(str(script.absolute()), run_name="__main__")
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:  # noqa: BLE001 - the script's, KeyboardInterrupt too
        code, failed = 130 if isinstance(error, KeyboardInterrupt) else 1, True
        _print_error(error, script.absolute())
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
