"""Warnings that show the user's line, however deep in this package they are raised."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = f"{__name__.partition('.')[0]}."


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost caller outside this package.

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
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
