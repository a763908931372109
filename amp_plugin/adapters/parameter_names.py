"""The names of an optimizer's parameters, among those of the models a program has shown us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


def names_in(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the parameters of modules by names that are theirs alone.

    One module's names are its own; of several, ``Critic.layer.weight``; of several of one class,
    ``Critic[0].layer.weight``, numbered as given.
    """
    kinds = [type(module).__name__ for module in modules]
    named: list[tuple[str, Tensor]] = []
    for i, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        number = f"[{kinds[:i].count(kind)}]" if kinds.count(kind) > 1 else ""
        prefix = f"{kind}{number}." if len(modules) > 1 else ""
        named += [(prefix + name, param) for name, param in module.named_parameters()]
    return named


def names_of(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the names of an optimizer's parameters; those of models not shown have none."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {name: param for name, param in named if id(param) in own}
