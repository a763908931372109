"""The op lists of each torch release, as data: which op has which rule on which device."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

TABLES: Final = ("cpu", "cuda", "mps", "xpu")

RELEASES: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The torch releases whose op lists the tables hold."""


def listed_rules(device_type: str, release: str) -> dict[str, str]:
    """Return op -> rule as a torch release registers them, ops that the installed torch lacks included.

    Args:
        device_type: one of ``TABLES``.
        release: ``"2.13"``, for example; one after the last in ``RELEASES`` has the lists of the last.

    Raises:
        ValueError: there is no table for the device.
    """
    table = _table(device_type)
    since, until = table.get("since", {}), table.get("until", {})
    return {
        op: group["rule"]
        for group in table["groups"]
        for op in group["ops"]
        if not (op in since and is_older(release, since[op]))
        if not (op in until and not is_older(release, until[op]))
    }


@cache
def _table(device_type: str) -> dict[str, Any]:
    if device_type not in TABLES:
        msg = f"no autocast rules for device {device_type!r}; allowed: {', '.join(TABLES)}"
        raise ValueError(msg)
    file = resources.files("amp_plugin.casting") / "tables" / f"{device_type}.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def is_older(release: str, than: str) -> bool:
    """Say whether a release, ``"2.9"`` for example, comes before another, ``"2.12"``."""
    return _numbers(release) < _numbers(than)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))
