"""Selects modules by name patterns or by class, for all options that name modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from amp_plugin.messages import did_you_mean

_WRAPPED: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """Return the name that a module or parameter has in the unwrapped model, without the names of wrappers.

    The wrappers are those of FSDP1, activation checkpointing and torch.compile.

    Example:
        >>> clean_name("_orig_mod.3.weight")
        '3.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def matched_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the submodules that match a pattern, as a dict from name to module.

    A pattern is a shell pattern for names, such as ``"blocks.*.norm"``, or the name of a class or base class,
    such as ``"LayerNorm"``. The dict has the same order as ``named_modules()``. The names do not include the
    wrappers of FSDP, activation checkpointing and torch.compile. ``torch.nn.Module`` does not count as a base
    class.
    """
    patterns = list(patterns)
    return {
        name: module
        for name, module in _submodules(model).items()
        if _kinds(module).intersection(patterns)
        or any(fnmatchcase(name, clean_name(pattern)) for pattern in patterns)
    }


def found_patterns(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match at least one submodule of a model."""
    return [pattern for pattern in patterns if matched_modules(model, [pattern])]


def require_matches(
    models: Sequence[nn.Module], patterns: Iterable[str], *, option: str = "fp32_modules"
) -> None:
    """Raise ValueError if a pattern matches no submodule of any model. The error names ``option``."""
    patterns = list(patterns)
    found = {pattern for model in models for pattern in found_patterns(model, patterns)}
    missing = next((pattern for pattern in patterns if pattern not in found), None)
    if missing is None:
        return
    modules = [item for model in models for item in _submodules(model).items()]
    names = dict.fromkeys(name for name, _ in modules)
    kinds = dict.fromkeys(sorted(set().union(*(_kinds(module) for _, module in modules))))
    hint = did_you_mean(missing, [*names, *kinds], at_most=3, separator=", ")
    owners = " or ".join(dict.fromkeys(type(model).__name__ for model in models))
    msg = f"{option}: {missing!r} is not a name or class of a module in {owners}"
    raise ValueError(msg + (hint or "; model.named_modules() lists them"))


def _submodules(model: nn.Module) -> dict[str, nn.Module]:
    named = ((clean_name(name), module) for name, module in model.named_modules(remove_duplicate=False))
    return {name: module for name, module in named if name}


def _kinds(module: nn.Module) -> set[str]:
    return {
        kind.__name__
        for kind in type(module).__mro__
        if issubclass(kind, nn.Module) and kind is not nn.Module
    }
