"""The hint that ends an error about a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

_LEAST_ALIKE: Final = 0.55  # share of letters in common; "init" is that near to "init_scale"


def did_you_mean(
    given: object,
    known: Iterable[str],
    *,
    aliases: Mapping[str, str] | None = None,
    written: Callable[[str], str] = str,
    at_most: int = 1,
    separator: str = "; ",
) -> str:
    """Return ``"; did you mean X?"``, or ``""`` if no known name is near.

    Args:
        given: what the user wrote.
        known: the names that are allowed.
        aliases: other words for known names; they win over names that look alike.
        written: how the user has to write a known name, for example in quotes.
        at_most: number of names to suggest, the nearest first.
        separator: what stands before the hint.

    Example:
        >>> did_you_mean("epoch", ["epochs", "seed"])
        '; did you mean epochs?'
        >>> did_you_mean("gpu", ["cpu", "cuda"], aliases={"gpu": "cuda"}, written=repr)
        "; did you mean 'cuda'?"
        >>> did_you_mean("xyz", ["epochs", "seed"])
        ''
    """
    alias = (aliases or {}).get(str(given))
    near = [alias] if alias else difflib.get_close_matches(str(given), list(known), at_most, _LEAST_ALIKE)
    return f"{separator}did you mean {' or '.join(map(written, near))}?" if near else ""
