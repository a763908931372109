"""Find the modules a user wants in fp32, by name or by class."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn


def keep_in_fp32(root: nn.Module, wanted: Sequence[str]) -> None:
    """Let modules compute in fp32 inside any autocast region, in place.

    Args:
        root: the model.
        wanted: module names (``"encoder.norm"``, ``"blocks.*.norm"``) or class names (``"LayerNorm"``).

    Raises:
        ValueError: nothing in the model has that name; the text gives the nearest.
    """
    if not wanted:
        return
    from amp_plugin.casting.modules import run_in  # noqa: PLC0415

    for pattern in wanted:
        found = list(_matches(root, pattern))
        if not found:
            raise ValueError(_nothing_found(root, pattern))
        for module in found:
            run_in(torch.float32)(module)


def _matches(root: nn.Module, pattern: str) -> Iterator[nn.Module]:
    for name, module in root.named_modules():
        classes = {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)} - {"Module"}
        if fnmatchcase(name, pattern) or pattern in classes:
            yield module


def _nothing_found(root: nn.Module, pattern: str) -> str:
    names = {name for name, _ in root.named_modules() if name}
    names |= {type(module).__name__ for module in root.modules()}
    near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"fp32_modules: no module of {type(root).__name__} has the name or class {pattern!r}{hint}; "
        "allowed are names as in model.named_modules(), with wildcards, and class names"
    )
