"""The casts of a script as rows, those of sibling modules in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from torch._dynamo.utils import counters

from amp_plugin.casting.cast_log import Cast, CastTotals
from amp_plugin.numerics.report import fold

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


def count_compiled_graphs() -> Callable[[], int]:
    """Return a function that returns how many graphs torch.compile has made since."""
    counters["stats"]["unique_graphs"] = 0
    return lambda: int(counters["stats"]["unique_graphs"])


def folded(casts: Sequence[Cast]) -> list[Cast]:
    """Return casts with one name for sibling modules that cast alike: ``Net.blocks.*.mlp, x12``."""
    siblings: dict[tuple[object, ...], dict[str, None]] = {}
    for cast in casts:
        siblings.setdefault(_kind(cast), {})[cast.module] = None
    names = {kind: _named(list(modules)) for kind, modules in siblings.items()}
    return [replace(cast, module=names[_kind(cast)]) for cast in casts]


def _kind(cast: Cast) -> tuple[object, ...]:
    """Return what the same cast in sibling modules has in common."""
    place = tuple("*" if part.isdecimal() else part for part in cast.module.split("."))
    return (place, cast.op, cast.argument, cast.kind, cast.before, cast.after)


def _named(modules: list[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{fold(modules)}, x{len(modules)}"


def rows(casts: Sequence[Cast], by: str) -> list[dict[str, Any]]:
    """Return casts, added up in groups, most bytes first.

    Args:
        casts: in any order.
        by: ``"cast"``, ``"module"`` or ``"op"``: what the casts of a group have in common.
    """
    groups: dict[tuple[str, ...], list[Cast]] = {}
    for cast in casts:
        groups.setdefault(tuple(_KEYS[by](cast).values()), []).append(cast)
    added = [_KEYS[by](casts[0]) | asdict(CastTotals.of(casts)) for casts in groups.values()]
    return sorted(added, key=lambda row: -int(row["bytes"]))
