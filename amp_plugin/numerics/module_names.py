"""Translate the names of modules between two implementations of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from amp_plugin.patterns import clean_name

_NOT_A_MAPPING = (
    "{path} is not a mapping of names; write a YAML file with lines such as: "
    "GPT.layers.*.mlp: Net.blocks.*.feed_forward"
)


def read_names(path: Path) -> dict[str, str]:
    """Read a YAML or JSON file that maps module names of the first run to module names of the second run.

    Raises:
        ValueError: The file does not contain a mapping from strings to strings.
    """
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(_NOT_A_MAPPING.format(path=path)) from error
    if not isinstance(held, dict) or not all(isinstance(text, str) for pair in held.items() for text in pair):
        raise ValueError(_NOT_A_MAPPING.format(path=path))
    return held


def check_names(names: Mapping[str, str]) -> None:
    """Raise ValueError if a name and its counterpart have different numbers of ``*``."""
    for first, second in names.items():
        if second.count("*") != first.count("*"):
            msg = f"{first} and {second} have different numbers of *; both names need the same number"
            raise ValueError(msg)


def name_in_first(names: Mapping[str, str], name: str) -> str:
    """Return the name that a module or weight of the second run has in the first run.

    A name stands for a module and all its submodules. ``*`` stands for one component of a dotted name, such
    as the number of a layer. If several names match, the longest one is used.

    Args:
        names: Maps module names of the first run to module names of the second run.
        name: The name in the second run.

    Example:
        >>> name_in_first({"GPT.layers.*.mlp": "Net.blocks.*.feed_forward"}, "Net.blocks.3.feed_forward.up")
        'GPT.layers.3.mlp.up'
    """
    parts = clean_name(name).split(".")
    matching = [(first.split("."), second.split(".")) for first, second in names.items()]
    matching = [(first, second) for first, second in matching if _begins_with(parts, second)]
    if not matching:
        return ".".join(parts)
    first, second = max(matching, key=lambda pair: len(pair[1]))
    found = iter([part for want, part in zip(second, parts, strict=False) if want == "*"])
    return ".".join([next(found) if part == "*" else part for part in first] + parts[len(second) :])


def _begins_with(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    fits = len(parts) >= len(wanted)
    return fits and all(want in {"*", part} for want, part in zip(wanted, parts, strict=False))
