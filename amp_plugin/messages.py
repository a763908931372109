"""What every message of this package has in common: the hint behind a misspelt name, and the user's line."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Final, TypeVar

Made = TypeVar("Made")

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
    """Return ``"; did you mean X?"`` with the names nearest to what was given, or ``""`` if none is near.

    ``aliases`` are other words for known names, and win over names that look alike.
    """
    alias = (aliases or {}).get(str(given))
    near = [alias] if alias else difflib.get_close_matches(str(given), list(known), at_most, _LEAST_ALIKE)
    return f"{separator}did you mean {' or '.join(map(written, near))}?" if near else ""


OTHERS_CODE: Final = {
    *("accelerate", "contextlib", "functools", "lightning", "lightning_fabric", "lightning_utilities"),
    *("pytorch_lightning", "torch", "transformers", __name__.partition(".")[0]),
}
"""Packages whose lines say nothing to a user: this one, and those that call it."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost caller outside this package, torch and the frameworks."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_others(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warned_at_user(make: Callable[..., Made], *args: Any) -> Made:
    """Call something of torch's, and show what it warns of at the user's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make(*args)
    for warning in caught:
        warn_user(str(warning.message), warning.category)
    return made


def _is_others(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in OTHERS_CODE
