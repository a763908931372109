"""Names that are gone, and what to use instead. Each raises an error that says so, until 0.5.

One table serves all of them: names of the package, attributes of its classes, and keywords.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_BY_DIAGNOSE: Final = "run `amp-plugin diagnose train.py`: it names the op and its line"

REMOVED: Final[dict[str, str]] = {
    # of the package
    "amp_plugin.diagnose_skip": _BY_DIAGNOSE,
    # of classes
    "AmpAccelerator.recorded": f"call the function itself, and {_BY_DIAGNOSE}",
    "AmpPrecision.run_again": _BY_DIAGNOSE,
    "GradScaler.explain_skips": _BY_DIAGNOSE,
    "GradScaler.recorded": f"call the function itself, and {_BY_DIAGNOSE}",
    "GradScaler.assume_unchanged": "call clip_and_step(optimizer, max_norm), which reads gradients once",
    "GradScaler.has_new_gradients": "compare gradients yourself",
    "GradScaler.has_scaled": "call scaler.core.has_scaled",
    "GradScaler.measure": "call scaler.core.measure()",
    "GradScaler.note_step": "call scaler.core.note_step()",
    "GradScaler.optimizers": "read scaler.core.optimizers",
    "GradScaler.optimizers_of": "call scaler.core.optimizers_of()",
    "GradScaler.overflowed_before_closure": "call scaler.core.overflowed_before_closure()",
    "GradScaler.parameter_names": "call scaler.core.parameter_names()",
    "GradScaler.place": "call scaler.core.place()",
    "GradScaler.result_of": "call last_step(), or scaler.core.result_of() before the first step",
    "StepResult.not_one_pass_because": "read one_pass and how",
    # keywords, whoever takes them: "name="
    "fold=": "call scaler.clip_and_step(optimizer, max_norm), which clips in the step",
    "fold_clip=": "call scaler.clip_and_step(optimizer, max_norm); the Trainer plugin does so by itself",
}
"""Where a name was -> what replaces it, as the second half of a sentence."""


def reason(*places: str) -> str | None:
    """Return the error text for a name that is gone from one of these places; None if none was there."""
    for place in places:
        if place in REMOVED:
            return f"{place} was removed in 0.4: {REMOVED[place]}"
    return None


def removed_attribute(self: object, name: str) -> Any:
    """Raise AttributeError, with what replaces a removed attribute: the ``__getattr__`` of a class."""
    if removed := reason(*(f"{kind.__name__}.{name}" for kind in type(self).__mro__)):
        raise AttributeError(removed)
    return object.__getattribute__(self, name)  # which raises the usual error, or that of a property


def refuse_removed(owner: str, keywords: Iterable[str]) -> None:
    """Raise TypeError if a keyword is one that is gone; ``owner`` is what was called."""
    for keyword in keywords:
        if (replaced_by := REMOVED.get(f"{keyword}=")) is not None:
            msg = f"{owner}({keyword}=...) was removed in 0.4: {replaced_by}"
            raise TypeError(msg)


def without_removed_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function say what replaces a removed keyword."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_removed(function.__qualname__, kwargs)
        return function(*args, **kwargs)

    return checked
