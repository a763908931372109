"""Check the options that a user gives an adapter, in the same words for all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from amp_plugin.casting.rules import OpRules
from amp_plugin.options import refuse_misfits

Init = TypeVar("Init", bound=Callable[..., None])


def names_checked(init: Init) -> Init:
    """Let an ``__init__`` say what it allows when it is given something else."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        refuse_misfits(type(self).__name__, signature, args, kwargs)
        init(self, *args, **kwargs)

    return cast("Init", checked)


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
