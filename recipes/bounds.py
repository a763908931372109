"""Bounds on the numbers in a config, checked when the config is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The conditions that a number in a config must satisfy, besides being finite.

    Attributes:
        least, most: The smallest and the largest value that is allowed.
        above, below: The number must be larger than ``above`` and smaller than ``below``.
        multiple_of: The number must be a multiple of this.
        length: For a list, the count of its numbers. Each of them must satisfy the bounds.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int = 1
    length: int | None = None

    def hold(self, value: Any) -> bool:
        """Return True if ``value``, a number or a list of numbers, satisfies the bounds."""
        if isinstance(value, list):
            return len(value) == self.length and all(map(self.hold, value))
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.multiple_of == 1 or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        """Return a text on what is allowed."""
        named = {"at least": self.least, "at most": self.most, "above": self.above, "below": self.below}
        said = [
            f"{word} {limit:g}" if isinstance(limit, float) else f"{word} {limit:,}"
            for word, limit in named.items()
            if limit is not None
        ]
        said += [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return (f"{self.length} numbers, each " if self.length else "") + " and ".join(said)


def out_of_bounds(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Bounds]]:
    """Yield the key, value and bounds of each out-of-bounds number in a config.

    Args:
        config: A dataclass. Its sections are dataclasses too.
        prefix: A string to put before each key, such as the name of the config section that contains the key.
    """
    for key in (entry.name for entry in fields(config)):
        value = getattr(config, key)
        if is_dataclass(value):
            yield from out_of_bounds(value, f"{prefix}{key}.")
        bounds = bounds_of(type(config), key)
        if bounds is not None and not bounds.hold(value):
            yield prefix + key, value, bounds


def bounds_of(schema: type, key: str) -> Bounds | None:
    """Return the bounds of a config key, from the first class in the MRO that declares bounds for the key."""
    for base in schema.__mro__:
        found = base.__dict__.get("__dataclass_fields__", {}).get(key)
        if found is not None and "bounds" in found.metadata:
            return Bounds(**found.metadata["bounds"])
    return None
