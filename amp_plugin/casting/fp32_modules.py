"""Keep chosen submodules of a model in fp32, by name or by class."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from amp_plugin.casting.run_in import run_in
from amp_plugin.patterns import matched_modules, require_matches


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
    in_fp32 = run_in(torch.float32, keep=keep, cast_back=cast_back)
    modules = matched_modules(model, patterns)
    for module in modules.values():
        in_fp32(module)
    return list(modules)
