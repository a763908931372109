"""Run a script unchanged and list the casts that autocast makes in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from amp_plugin.casting.cast_log import CastLog, log_casts
from amp_plugin.casting.casts import Cast, CastTotals
from amp_plugin.program import Program
from amp_plugin.program_run import ProgramRun, run_program

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


def run_logged(program: Program, arguments: Sequence[str]) -> tuple[CastLog, ProgramRun]:
    """Run a program with a cast log open.

    Args:
        program: A file or a module.
        arguments: Its arguments.

    Returns:
        The closed log of its casts, and how the program ended.

    Raises:
        RuntimeError: The native core is not loaded.
    """
    log = log_casts()
    return log, run_program(program, arguments, around=log)


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
