"""Creates option errors, suggestions for misspelled names, and warnings that point to the user's code."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, TypeVar

Made = TypeVar("Made")

_LEAST_ALIKE: Final = 0.55  # similarity of "init" and "init_scale"


def did_you_mean(
    given: object,
    known: Iterable[str],
    *,
    aliases: Mapping[str, str] | None = None,
    written: Callable[[str], str] = str,
    at_most: int = 1,
    separator: str = "; ",
) -> str:
    """Return ``"; did you mean X?"`` with the known names most similar to ``given``, or ``""``.

    ``aliases`` maps alternative words to the known names that they stand for. An alias takes precedence over
    similar names.
    """
    alias = (aliases or {}).get(str(given))
    near = [alias] if alias else difflib.get_close_matches(str(given), list(known), at_most, _LEAST_ALIKE)
    return f"{separator}did you mean {' or '.join(map(written, near))}?" if near else ""


class OptionError(ValueError, TypeError):
    """An option has a value that is not allowed.

    The error is also a TypeError, because releases before 0.4 raised TypeError for values of the wrong type.

    Attributes:
        option: the option's name.
        value: the value that was given.
        allowed: a description of the allowed values.
        source: the place where the option was set, which is ``"argument"``, the name of an environment
            variable, ``AMP_PLUGIN_CONFIG=<file>``, or the class of an options object such as ``"AmpKwargs"``.

    Example:
        >>> from amp_plugin import GradScaler, OptionError
        >>> try:
        ...     GradScaler("cpu", growth_factor=1)
        ... except OptionError as raised:
        ...     error = raised
        >>> error.option, error.value, error.source
        ('growth_factor', 1, 'argument')
    """

    def __init__(
        self, option: str, value: object, allowed: str, text: str = "", others: tuple[str, ...] = ()
    ) -> None:
        # Copies and pickles of the error are made from these arguments.
        super().__init__(option, value, allowed, text, others)
        self.option, self.value, self.allowed = option, value, allowed
        self.source = "argument"
        self._text = text or f"{option}={value!r} is not allowed; give {allowed}"
        self._others = others  # other options that conflict with it

    def __str__(self) -> str:
        return self._text

    def set_by(self, sources: Mapping[str, str]) -> None:
        """Add the source of the option to the error message. ``sources`` maps each option to its source."""
        options = (self.option, *self._others)
        named = [name for name in options if sources.get(name, self.source) != "argument"]
        if named and self.source == "argument":
            self.source = sources.get(self.option, self.source)
            self._text += f" ({'; '.join(f'{name} comes from {sources[name]}' for name in named)})"


@contextmanager
def naming(sources: Mapping[str, str]) -> Iterator[None]:
    """Add the source of the option to errors in the block. ``sources`` maps each option to its source."""
    try:
        yield
    except OptionError as error:
        error.set_by(sources)
        raise


OTHERS_CODE: Final = {
    *(
        "accelerate",
        "contextlib",
        "functools",
        "ignite",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
    ),
    *("pytorch_lightning", "torch", "transformers", __name__.partition(".")[0]),
}
"""Packages whose lines warnings do not show: amp_plugin, and the packages that call it."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the innermost caller outside amp_plugin, torch and the frameworks."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_others(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warned_at_user(make: Callable[..., Made], *args: Any) -> Made:
    """Call a torch function, and report its warnings at the line in the user's code that led to the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make(*args)
    for warning in caught:
        warn_user(str(warning.message), warning.category)
    return made


def _is_others(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in OTHERS_CODE


@contextmanager
def only_warning(what: str, end: Callable[[], object]) -> Iterator[None]:
    """Turn an exception in code that only observes a run into a warning, and call ``end``.

    The run continues.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no error of an observer may end a run
        with suppress(Exception):
            end()
        warn_user(f"{what} has ended: {type(error).__name__}: {error}; training goes on")
