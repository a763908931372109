"""Keep chosen submodules of a model in fp32, by name or by class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from amp_plugin.casting.op_names import nearest
from amp_plugin.casting.run_in import run_in


def apply_fp32_modules(
    model: nn.Module, patterns: Iterable[str], *, keep: Iterable[str] = (), cast_back: bool = False
) -> list[str]:
    """Keep the submodules that match a name pattern or a class name in fp32.

    Args:
        model: changed in place.
        patterns: shell patterns for names of ``model.named_modules()``, such as ``"*.roi_pool"``, or
            names of classes, such as ``"LayerNorm"``.
        keep: names of arguments that are passed as they came, as for ``run_in``.
        cast_back: hand outputs back in the dtype that came in, as for ``run_in``.

    Returns:
        The names of the modules, in the order of ``named_modules``.

    Raises:
        ValueError: a pattern matches nothing; the text names the nearest.
        TypeError: a match can never be called (``ModuleList``); match its children instead.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    require_matches([model], patterns)
    modules = _named(model)
    in_fp32 = run_in(torch.float32, keep=keep, cast_back=cast_back)
    names = matched_names(model, patterns)
    for name in names:
        in_fp32(modules[name])
    return names


def require_matches(models: Sequence[nn.Module], patterns: Iterable[str]) -> None:
    """Raise unless each pattern matches a submodule of one of the models.

    Args:
        models: the models that are trained together.
        patterns: as for :func:`apply_fp32_modules`.

    Raises:
        ValueError: a pattern matches nothing; the text names the nearest.
    """
    modules = [(name, module) for model in models for name, module in _named(model).items()]
    for pattern in patterns:
        if any(_is_meant(name, module, pattern) for name, module in modules):
            continue
        known = {name: None for name, _ in modules} | dict.fromkeys(
            sorted(set().union(*(_kinds(module) for _, module in modules)))
        )
        near = nearest(pattern, list(known)) or "; model.named_modules() lists them"
        owners = " or ".join(dict.fromkeys(type(model).__name__ for model in models))
        msg = f"fp32_modules: {pattern!r} is no name or class of a module in {owners}{near}"
        raise ValueError(msg)


def matched_names(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the names of the submodules that match a pattern, in the order of ``named_modules``."""
    patterns = list(patterns)
    return [
        name
        for name, module in _named(model).items()
        if any(_is_meant(name, module, pattern) for pattern in patterns)
    ]


def matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match a submodule of a model."""
    modules = _named(model)
    return [
        pattern
        for pattern in patterns
        if any(_is_meant(name, module, pattern) for name, module in modules.items())
    ]


def _named(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name}


def _is_meant(name: str, module: nn.Module, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or pattern in _kinds(module)


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)} - {"Module"}
