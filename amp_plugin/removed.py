"""Lists removed names with their replacements.

Until release 0.5, using a removed name raises an error that names the replacement.

The removed names are public names of the package, attributes of its classes, and keyword arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_BY_DIAGNOSE: Final = "run `amp-plugin diagnose train.py`: it names the op and its line"

REMOVED: Final[dict[str, str]] = {
    # names of the package
    "amp_plugin.diagnose_skip": _BY_DIAGNOSE,
    # attributes of classes
    "AmpAccelerator.recorded": f"call the function itself, and {_BY_DIAGNOSE}",
    "AmpPrecision.run_again": _BY_DIAGNOSE,
    "GradScaler.explain_skips": _BY_DIAGNOSE,
    "GradScaler.recorded": f"call the function itself, and {_BY_DIAGNOSE}",
    "GradScaler.assume_unchanged": "call clip_and_step(optimizer, max_norm), which reads gradients once",
    "GradScaler.ensure_unscaled": "call unscale_(), or nothing: clips and steps unscale gradients that are "
    "still scaled",
    "GradScaler.has_new_gradients": "compare gradients yourself",
    "GradScaler.has_scaled": "call scaler.core.has_scaled",
    "GradScaler.measure": "call scaler.core.measure()",
    "GradScaler.note_step": "call scaler.core.note_step()",
    "GradScaler.optimizers": "read scaler.core.optimizers",
    "GradScaler.optimizers_of": "call scaler.core.optimizers_of()",
    "GradScaler.overflowed_before_closure": "read last_step(optimizer).skipped",
    "GradScaler.parameter_names": "call scaler.core.state(optimizer).parameter_names()",
    "GradScaler.place": "call scaler.core.place()",
    "GradScaler.result_of": "call last_step(), or scaler.core.result_of() before the first step",
    "GradScaler.step_log": "read last_step() and skipped_steps(); adapters call scaler.core.log",
    "StepResult.not_one_pass_because": "read one_pass and how",
    # keywords of any function: "name="
    "float8_config=": "write recipe=..., which takes torchao's configuration or the name of a recipe",
    "fold=": "call scaler.clip_and_step(optimizer, max_norm), which clips in the step",
    "fold_clip=": "call scaler.clip_and_step(optimizer, max_norm); the Trainer plugin does so by itself",
}
"""Maps each removed name to its replacement, worded as the second half of an error message."""


def reason(*places: str) -> str | None:
    """Return the error message if one of these names was removed, else None."""
    for place in places:
        if place in REMOVED:
            return f"{place} was removed in 0.4: {REMOVED[place]}"
    return None


def removed_attribute(self: object, name: str) -> Any:
    """Raise AttributeError for a missing attribute. If the attribute was removed, name the replacement."""
    if removed := reason(*(f"{kind.__name__}.{name}" for kind in type(self).__mro__)):
        raise AttributeError(removed)
    return object.__getattribute__(self, name)  # raises the usual error


def refuse_removed(owner: str, keywords: Iterable[str]) -> None:
    """Raise TypeError if the caller passes a removed keyword argument to the function named ``owner``."""
    for keyword in keywords:
        if (replaced_by := REMOVED.get(f"{keyword}=")) is not None:
            msg = f"{owner}({keyword}=...) was removed in 0.4: {replaced_by}"
            raise TypeError(msg)


def without_removed_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise an error that names the replacement if a removed keyword is passed."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_removed(function.__qualname__, kwargs)
        return function(*args, **kwargs)

    return checked
