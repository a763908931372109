"""A file of op rules as it was written: its head and its entries, checked for form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from amp_plugin.casting.rule_tables import RELEASES, TABLES
from amp_plugin.did_you_mean import did_you_mean

_KEYS = ("device_type", "rules", "torch", "base")


@dataclass(frozen=True, kw_only=True, slots=True)
class RulesFile:
    """What a rules file says.

    Attributes:
        device_type: the device that the rules are for.
        torch: the torch release that they were written with, ``"2.13"``; ``""`` where the file does not say.
        base: the policy that they change, ``"torch-2.13"``; ``""`` for the default of the installed torch.
        entries: op -> (rule or None for the one it has, names of arguments that are never cast).
    """

    device_type: str
    torch: str
    base: str
    entries: Mapping[str, tuple[str | None, tuple[str, ...]]]


def read_rules_file(path: str | Path) -> RulesFile:
    """Read a rules file without looking its ops up.

    Raises:
        OSError: it cannot be read.
        ValueError: a key is unknown or missing, or a value is not allowed; the text names the file.
    """
    try:
        return _rules_file(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        msg = f"{path}: {error}"
        raise ValueError(msg) from error


def release_of(policy: str) -> str:
    """Return ``"2.13"`` for the policy ``"torch-2.13"``.

    Raises:
        ValueError: there is no such policy.
    """
    names = [f"torch-{release}" for release in RELEASES]
    if policy in names:
        return policy.removeprefix("torch-")
    release = re.fullmatch(r"(?:torch[-=]*)?v?(\d+\.\d+)\S*", str(policy))
    meant = f"torch-{release[1]}" if release else str(policy)
    near = did_you_mean(meant, names, separator=", ")
    msg = f"unknown policy {policy!r}{near}; allowed: {', '.join(names)}"
    raise ValueError(msg)


def _rules_file(data: Any) -> RulesFile:
    if not isinstance(data, Mapping):
        msg = f"a rules file is a mapping with the keys device_type and rules, got {_kind(data)}"
        raise TypeError(msg)
    for key in data:
        if key not in _KEYS:
            near = did_you_mean(str(key), _KEYS, at_most=3, separator=", ")
            msg = f"unknown key {key!r}{near}; allowed: {', '.join(_KEYS)}"
            raise ValueError(msg)
    if "device_type" not in data:
        msg = f"the key device_type is missing; give one of {', '.join(TABLES)}"
        raise ValueError(msg)
    entries = data.get("rules") or {}
    if not isinstance(entries, Mapping):
        msg = f"rules: give a mapping of op to rule (aten::softmax.int: fp32), got {_kind(entries)}"
        raise TypeError(msg)
    base = data.get("base") or ""
    if base:
        release_of(base)
    return RulesFile(
        device_type=data["device_type"],
        torch=_release(data.get("torch", "")),
        base=base,
        entries={op: _entry(entry) for op, entry in entries.items()},
    )


def _release(noted: Any) -> str:
    """Return the first two numbers of a version, given as text."""
    if noted == "":
        return ""
    found = re.match(r"(\d+\.\d+)(?!\d)", noted) if isinstance(noted, str) else None
    if found is None:
        msg = f"torch: give the version as text, torch: '2.13', got {noted!r}"
        raise ValueError(msg)
    return found[1]


def _entry(entry: Any) -> tuple[str | None, tuple[str, ...]]:
    if isinstance(entry, Mapping):
        return entry.get("rule"), tuple(entry.get("keep", ()))
    return entry, ()


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"
