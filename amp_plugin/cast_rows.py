"""The casts of a script as rows of data, added up in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from amp_plugin.casting.cast_log import Cast, CastLog, CastTotals

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
