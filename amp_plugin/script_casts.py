"""Run a script as it is and list the casts that autocast makes in it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from amp_plugin.casting.active import set_default_rules
from amp_plugin.casting.cast_log import Cast, CastLog, CastTotals, log_casts
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


def run_logged(script: Path, arguments: Sequence[str]) -> tuple[CastLog, int]:
    """Run ``script`` as the main program with a cast log open.

    ``torch.autocast`` blocks are listed too: while the script runs they follow this package's
    default rules, which are torch's.

    Args:
        script: A Python file.
        arguments: Its arguments.

    Returns:
        The log and the script's exit code.

    Raises:
        RuntimeError: There is no native core.
    """
    log, code, argv, path = log_casts(), 0, sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    for device_type in TABLES:
        if torch.amp.is_autocast_available(device_type):
            set_default_rules(OpRules.default(device_type))
    try:
        with log:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        code = _exit_code(stop)
    finally:
        set_default_rules(None)
        sys.argv, sys.path[:] = argv, path
    return log, code


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.code, int) or stop.code is None:
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def rows(log: CastLog, by: str) -> list[dict[str, Any]]:
    """Return the casts of a log added up, most bytes first.

    Args:
        log: A closed log.
        by: ``"cast"``, ``"module"`` or ``"op"``: what a row stands for.
    """
    groups: dict[tuple[str, ...], list[Cast]] = {}
    for cast in log.records():
        groups.setdefault(tuple(_KEYS[by](cast).values()), []).append(cast)
    added = [_KEYS[by](casts[0]) | asdict(CastTotals.of(casts)) for casts in groups.values()]
    return sorted(added, key=lambda row: -int(row["bytes"]))
