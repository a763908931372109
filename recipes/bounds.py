"""Which numbers the keys of a config take, said beside their defaults and checked in one place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a number must be; finite it must be always.

    Attributes:
        least, most: the smallest and the largest number allowed.
        above, below: numbers just outside.
        multiple_of: whole numbers that this divides.
        length: for a list, of how many numbers; each has to fit.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int = 1
    length: int | None = None

    def hold(self, value: Any) -> bool:
        """Whether ``value``, a number or a list of numbers, fits."""
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
        """Say what is allowed."""
        named = {"at least": self.least, "at most": self.most, "above": self.above, "below": self.below}
        said = [
            f"{word} {limit:g}" if isinstance(limit, float) else f"{word} {limit:,}"
            for word, limit in named.items()
            if limit is not None
        ]
        said += [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return (f"{self.length} numbers, each " if self.length else "") + " and ".join(said)


def number(default: float, **bounds: Any) -> Any:
    """Return a dataclass field with a default and the numbers it takes.

    Args:
        default: an int or a float.
        **bounds: as ``Bounds`` has them. A subclass that gives another default keeps them.
    """
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


def out_of_bounds(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Bounds]]:
    """Yield key, value and bounds of each number of a config that is not allowed.

    Args:
        config: a dataclass; its sections are dataclasses too.
        prefix: of the keys.
    """
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from out_of_bounds(value, f"{prefix}{each.name}.")
        bounds = bounds_of(type(config), each.name)
        if bounds is not None and not bounds.hold(value):
            yield prefix + each.name, value, bounds


def bounds_of(schema: type, key: str) -> Bounds | None:
    """Return the bounds of a key, those of the nearest class that gives any."""
    for base in schema.__mro__:
        found = base.__dict__.get("__dataclass_fields__", {}).get(key)
        if found is not None and "bounds" in found.metadata:
            return found.metadata["bounds"]  # type: ignore[no-any-return]
    return None
