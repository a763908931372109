"""Rules as data: torch's op lists by release, and the files that users write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from amp_plugin.messages import did_you_mean

TABLES: Final = ("cpu", "cuda", "mps", "xpu")

RELEASES: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The torch releases whose op lists the tables hold."""


def listed_rules(device_type: str, release: str) -> dict[str, str]:
    """Return op -> rule as a torch release registers them, ops that the installed torch lacks included.

    A release after the last in ``RELEASES`` has the lists of the last.
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
    """Return whether a release, ``"2.9"`` for example, comes before another, ``"2.12"``."""
    first, second = ([int(number) for number in name.split(".")[:2]] for name in (release, than))
    return first < second


def torch_release() -> str:
    """Return the release of the installed torch, ``"2.13"`` for example."""
    import torch  # noqa: PLC0415 -- the command line lists policies without it

    return ".".join(torch.__version__.split(".")[:2])


def release_of(policy: str) -> str:
    """Return ``"2.13"`` for the policy ``"torch-2.13"``; raise ValueError if there is no such policy."""
    names = [f"torch-{release}" for release in RELEASES]
    if policy in names:
        return policy.removeprefix("torch-")
    near = did_you_mean(policy, names, separator=", ")
    msg = f"unknown policy {policy!r}{near}; allowed: {', '.join(names)}"
    raise ValueError(msg)


_KEYS = {"device_type": "", "rules": {}, "torch": "", "base": ""}  # with what they are if a file has them not


def read_rules_file(path: str | Path) -> dict[str, Any]:
    """Return the four keys of a rules file, without looking its ops up; a ValueError says what is wrong."""
    data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(data, Mapping):
        msg = f"a rules file is a mapping with the keys device_type and rules, got {data!r}"
        raise ValueError(msg)  # noqa: TRY004 - of the file, not of an argument
    for key in data.keys() - _KEYS.keys():
        near = did_you_mean(str(key), _KEYS, at_most=3, separator=", ")
        msg = f"unknown key {key!r}{near}; allowed: {', '.join(_KEYS)}"
        raise ValueError(msg)
    file = _KEYS | {key: value for key, value in data.items() if value is not None}
    if not file["device_type"]:
        msg = f"the key device_type is missing; give one of {', '.join(TABLES)}"
        raise ValueError(msg)
    if not isinstance(file["rules"], Mapping):
        msg = f"rules: give a mapping of op to rule (aten::softmax.int: fp32), got {file['rules']!r}"
        raise ValueError(msg)  # noqa: TRY004
    if not isinstance(file["torch"], str) or not re.match(r"\d+\.\d+(?!\d)|$", file["torch"]):
        msg = f"torch: give the version as text, torch: '2.13', got {file['torch']!r}"
        raise ValueError(msg)
    return file
