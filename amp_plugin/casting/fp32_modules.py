"""Keep chosen submodules of a model in fp32, by name or by class."""

from __future__ import annotations

from collections.abc import Iterable
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
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    kinds = {name: _kinds(module) for name, module in modules.items()}
    in_fp32 = run_in(torch.float32, keep=keep, cast_back=cast_back)
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {name for name in modules if fnmatchcase(name, pattern) or pattern in kinds[name]}
        if not found:
            near = (
                nearest(pattern, [*modules, *set().union(*kinds.values())])
                or "; model.named_modules() lists them"
            )
            msg = f"fp32_modules: {pattern!r} is no name or class of a module in {type(model).__name__}{near}"
            raise ValueError(msg)
        matched.update(found)
    for name in matched:
        in_fp32(modules[name])
    return [name for name in modules if name in matched]


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)} - {"Module"}
