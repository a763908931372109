"""Looks up the names, overloads and arguments of torch's registered ops."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import torch

from amp_plugin.messages import did_you_mean

# The arguments that batch norms update, although most of their schemas do not say so.
_WRITTEN_UNSAID = frozenset({"running_mean", "running_var"})


def _registered() -> dict[str, list[str]]:
    """Return a dict whose keys are the names of all ops and of all overloads.

    The value for an op is a list of the full names of its overloads. The value for an overload is a list that
    contains only its full name.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for full in map(full_name, torch._C._dispatch_get_all_op_names()):
        names[full].append(full)
        names[full.split(".")[0]].append(full)
    return names


def overloads_of(op: object) -> list[str]:
    """Return the full names of the overloads to which a rule for ``op`` applies."""
    name, registered = _name_of(op), _registered()
    overloads = registered.get(name, [])
    if not overloads:
        usable = [known for known, fulls in registered.items() if not all(map(_is_written_form, fulls))]
        msg = f"unknown op {name!r}{nearest(name, usable)}"
        raise ValueError(msg)
    functional = [full for full in overloads if not _is_written_form(full)]
    if not functional:
        written = sorted({argument for full in overloads for argument in written_arguments(full)})
        base = name.split(".")[0].rstrip("_")
        msg = (
            f"{name} writes into {', '.join(written)}: in-place and out= forms are never autocast; "
            f"give a rule to {base}"
        )
        raise ValueError(msg)
    return sorted(functional)


def _name_of(op: object) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return full_name(op._name)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str) and "::" in op:
        return op
    near = ""
    if isinstance(op, str):  # mm, torch.mm or aten.mm.default
        meant, known = f"aten::{re.sub(r'^(torch[.])?(ops[.])?(aten[.])?', '', op)}", _registered()
        near = nearest(meant, [meant] if meant in known else known)
    msg = f"an op is named like 'aten::softmax.int' or given as torch.ops.aten.softmax.int, got {op!r}{near}"
    raise ValueError(msg)


def _is_written_form(full: str) -> bool:
    """Return whether an overload is the in-place or ``out=`` variant of one of torch's ops.

    The result is False for custom ops, and for ops that only update statistics in their arguments, such as
    fake quantization.
    """
    if not (full.startswith("aten::") and schema_of(full).is_mutable):
        return False
    outputs = [argument for argument in schema_of(full).arguments if argument.kwarg_only]
    is_out = any(a.alias_info is not None and a.alias_info.is_write for a in outputs)
    return is_out or full.split(".", maxsplit=1)[0].endswith("_")


def full_name(dispatcher_name: str) -> str:
    """Return the full name of an op, such as ``aten::mm.default`` for the dispatcher's ``aten::mm``."""
    return dispatcher_name if "." in dispatcher_name else f"{dispatcher_name}.default"


def dispatcher_name(full: str) -> str:
    """Return the dispatcher's name of an op, such as ``aten::mm`` for ``aten::mm.default``."""
    return full.removesuffix(".default")


def schema_of(full: str) -> torch._C.FunctionSchema:
    """Return the schema of the op that has this full name."""
    name, overload = full.split(".", 1)
    return torch._C._get_schema(name, "" if overload == "default" else overload)


def names_an_op(name: str) -> bool:
    """Return whether the installed torch has an op or overload with this name."""
    return name in _registered()


def is_registered(full: str) -> bool:
    """Return whether this build of torch has an op. For example, CPU builds lack cuDNN's ops."""
    return "." in full and torch._C._dispatch_has_kernel(dispatcher_name(full))


def argument_names(full: str) -> list[str]:
    """Return the names of an op's arguments, in order."""
    return [argument.name for argument in schema_of(full).arguments]


def written_arguments(full: str) -> frozenset[str]:
    """Return the names of the arguments to which an op writes. A cast of them would lose the result."""
    arguments = schema_of(full).arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return frozenset(written | (_WRITTEN_UNSAID & {a.name for a in arguments}))


def check_arguments(full: str, wanted: Iterable[str]) -> None:
    """Raise ValueError if an op has no argument with one of these names."""
    names = argument_names(full)
    for name in sorted(set(wanted) - set(names)):
        msg = f"{full} has no argument {name!r}{nearest(name, names)}; it has {', '.join(names)}"
        raise ValueError(msg)


def dtype_overload(full: str) -> str | None:
    """Return the overload with the same arguments plus a final ``dtype``, or None if there is none."""
    arguments, packet = argument_names(full), full.partition(".")[0]
    candidates = [name for name in _registered()[packet] if name.endswith("dtype")]
    return next((name for name in candidates if argument_names(name) == [*arguments, "dtype"]), None)


def nearest(word: str, among: Iterable[str]) -> str:
    """Return ``", did you mean X or Y?"`` for an unknown word, or ``""`` if no known word is similar."""
    return did_you_mean(word, among, at_most=3, separator=", ")
