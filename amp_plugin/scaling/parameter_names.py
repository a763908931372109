"""The names of an optimizer's parameters, for errors and overflow reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ParameterNames:
    """Names given to parameters, also to those that may join an optimizer later."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Tensor, str]] = {}  # swap_tensors forbids weak references

    def add(self, named: Mapping[str, Tensor]) -> None:
        """Take over names."""
        self._given.update((id(param), (param, name)) for name, param in named.items())

    def of(self, params: Iterable[Tensor], optimizer: Optimizer | None) -> list[str]:
        """Return the name of each parameter: a given one, else by the optimizer's group and index."""
        params = list(params)
        known = [] if optimizer is None else default_names(optimizer)
        known += [f"parameter {i}" for i in range(len(known), len(params))]
        pairs = zip(params, known, strict=False)
        return [self._given.get(id(param), (param, name))[1] for param, name in pairs]

    def has(self, param: Tensor, optimizer: Optimizer | None) -> bool:
        """Whether a parameter has a name of its own, given here or by the optimizer."""
        groups = [] if optimizer is None else optimizer.param_groups
        return id(param) in self._given or any("param_names" in group for group in groups)


def default_names(optimizer: Optimizer) -> list[str]:
    """Name parameters by what the optimizer knows: their names, else group and index."""
    names: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        label = group.get("name", f"group {number}")
        names += given or [f"{label}[{i}]" for i in range(len(group["params"]))]
    return names


def checked_names(names: Any) -> dict[str, Tensor]:
    """Return names as a mapping."""
    pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names or {}
    try:
        named = dict(pairs)
    except (TypeError, ValueError):
        named = {"": None}
    if not all(isinstance(param, Tensor) for param in named.values()):
        msg = (
            f"register(names=...): a module, its named_parameters(), or a mapping of names to parameters is "
            f"wanted, got {type(names).__name__}"
        )
        raise TypeError(msg)
    return named


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
