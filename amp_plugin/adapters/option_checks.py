"""Check the options that a user gives an adapter, in the same words for all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar, cast

from amp_plugin.casting.rules import OpRules
from amp_plugin.did_you_mean import did_you_mean

Init = TypeVar("Init", bound=Callable[..., None])


def unknown_option(source: str, name: object, allowed: Iterable[str]) -> str:
    """Return the error text for a name that is no option: what is allowed, and what may be meant."""
    allowed = list(allowed)
    return f"{source}: unknown option {name!r}; allowed are {', '.join(allowed)}{did_you_mean(name, allowed)}"


def refuse_misfits(
    owner: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Iterable[str]
) -> None:
    """Raise if arguments do not fit a class.

    Args:
        owner: the class, as the user calls it.
        signature: that of its ``__init__``, with ``self``.
        args: arguments given by position.
        kwargs: names of those given by name.

    Raises:
        TypeError: a name is unknown, or there are too many arguments without one.
    """
    params = list(signature.parameters.values())[1:]
    allowed = [param.name for param in params]
    for name in kwargs:
        if name not in allowed:
            raise TypeError(unknown_option(owner, name, allowed))
    positional = sum(param.kind is not inspect.Parameter.KEYWORD_ONLY for param in params)
    if len(args) > positional:
        listed = ", ".join(allowed)
        msg = f"{owner}: too many positional arguments; allowed are {listed}: give them by name"
        raise TypeError(msg)


def names_checked(init: Init) -> Init:
    """Let an ``__init__`` say what it allows when it is given something else."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        refuse_misfits(type(self).__name__, signature, args, kwargs)
        init(self, *args, **kwargs)

    return cast("Init", checked)


def flag(name: str, value: object, *, none: bool = False) -> None:
    """Raise if an option is neither True nor False (nor None, if that is allowed).

    Raises:
        TypeError: it is something else, ``"yes"`` for example.
    """
    if not (isinstance(value, bool) or (none and value is None)):
        msg = f"{name}={value!r} is not allowed; give {'True, False or None' if none else 'True or False'}"
        raise TypeError(msg)


def number(name: str, value: object, *, none: bool = False) -> None:
    """Raise if an option is no number (nor None, if that is allowed).

    Raises:
        TypeError: it is something else, a text for example.
    """
    is_number = isinstance(value, SupportsFloat) and not isinstance(value, bool)
    if not (is_number or (none and value is None)):
        msg = f"{name}={value!r} is not allowed; give a number{' or None' if none else ''}"
        raise TypeError(msg)


def rules_from(given: Any, source: str = "") -> OpRules:
    """Return op rules, given as such or as the path of a YAML file.

    Raises:
        ValueError: there is no such file, or it holds no rules, or this is something else.
    """
    if isinstance(given, OpRules):
        return given
    place = f"rules={str(given) if isinstance(given, Path) else given!r}{f' from {source}' if source else ''}"
    wanted = "give an OpRules or the path of a YAML file of rules"
    if not isinstance(given, str | Path):
        msg = f"{place} is not allowed; {wanted}"
        raise ValueError(msg)  # noqa: TRY004 -- as for a file that holds something else
    try:
        return OpRules.from_yaml(given)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        msg = f"{place}: {what}; {wanted}"
        raise ValueError(msg) from error


def refuse_other_eval_precision(in_eval: str | None, precision: str) -> None:
    """Raise if a sharded model is to compute in another precision in evaluation.

    Args:
        in_eval: the ``eval_precision`` asked for.
        precision: that of training, in which FSDP gathers the weights.

    Raises:
        ValueError: it is.
    """
    if in_eval is not None and in_eval != precision and "fp32" != precision != "no":
        msg = (
            f"eval_precision={in_eval!r} does not work under FSDP, which gathers weights in {precision!r} "
            "in evaluation too; leave eval_precision out"
        )
        raise ValueError(msg)
