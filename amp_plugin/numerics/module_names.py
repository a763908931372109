"""Translate the names of modules between two implementations of one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from amp_plugin.patterns import clean_name

_NOT_A_MAPPING = (
    "{path} is not a mapping of names; write a YAML file with lines such as: "
    "GPT.layers.*.mlp: Net.blocks.*.feed_forward"
)


class ModuleNames:
    """Translates the module names of the second run into those of the first run.

    A name stands for a module and all its submodules. ``*`` stands for one component of a dotted name, such
    as the number of a layer. If several names match, the longest one is used.

    Args:
        names: Maps module names of the first run to module names of the second run.

    Example:
        >>> names = ModuleNames({"GPT.layers.*.mlp": "Net.blocks.*.feed_forward"})
        >>> names.of("Net.blocks.3.feed_forward.up")
        'GPT.layers.3.mlp.up'
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = dict(names or {})
        pairs = [(second.split("."), first.split(".")) for first, second in (names or {}).items()]
        for second, first in pairs:
            if second.count("*") != first.count("*"):
                pair = f"{'.'.join(first)} and {'.'.join(second)}"
                msg = f"{pair} have different numbers of *; both names need the same number"
                raise ValueError(msg)
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))

    @classmethod
    def read(cls, path: Path) -> ModuleNames:
        """Read a YAML or JSON file with a mapping.

        Raises:
            ValueError: The file does not contain a mapping from strings to strings.
        """
        try:
            held = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(_NOT_A_MAPPING.format(path=path)) from error
        if not isinstance(held, dict) or not all(
            isinstance(text, str) for pair in held.items() for text in pair
        ):
            raise ValueError(_NOT_A_MAPPING.format(path=path))
        return cls(held)

    def inverted(self) -> ModuleNames:
        """Return a ``ModuleNames`` that translates names of the first run into names of the second run."""
        return ModuleNames({second: first for first, second in self._names.items()})

    def of(self, name: str) -> str:
        """Return the name that a module or weight of the second run has in the first run."""
        parts = clean_name(name).split(".")
        for second, first in self._pairs:
            head = parts[: len(second)]
            if len(head) == len(second) and all(
                want in {"*", part} for want, part in zip(second, head, strict=True)
            ):
                found = iter([part for want, part in zip(second, head, strict=True) if want == "*"])
                return ".".join(
                    [next(found) if part == "*" else part for part in first] + parts[len(second) :]
                )
        return ".".join(parts)
