"""Warnings that show the user's line, however deep in this package they are raised."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

Made = TypeVar("Made")

OTHERS_CODE: Final = {
    *("accelerate", "contextlib", "functools", "lightning", "lightning_fabric", "lightning_utilities"),
    *("pytorch_lightning", "torch", "transformers", __name__.partition(".")[0]),
}
"""Packages whose lines say nothing to a user: this one, and those that call it."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost caller outside this package, torch and the frameworks.

    Args:
        text: what happened, and what to do.
        category: the kind of warning.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_user("the scale is high", RuntimeWarning)
        >>> caught[0].category.__name__
        'RuntimeWarning'
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_others(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warned_at_user(make: Callable[..., Made], *args: Any) -> Made:
    """Call something of torch's, and show what it warns of at the user's line.

    Args:
        make: what to call.
        *args: its arguments.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make(*args)
    for warning in caught:
        warn_user(str(warning.message), warning.category)
    return made


def _is_others(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in OTHERS_CODE
