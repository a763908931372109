"""Find the modules of parameters that nobody has named.

A loss can be a module with parameters of its own. Often no framework prepares it, but the optimizer steps its
parameters, so errors and reports can be about them. Python's garbage collector knows all modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Final

from torch import Tensor, nn

# The names by which DistributedDataParallel, torch.compile and Fabric keep the module that they wrap.
_WRAPPED_AS: Final = {"module", "_orig_mod", "_forward_module", "_original_module"}


def module_paths(params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Map names to those of the parameters that belong to a module of this process.

    A name is the class of the outermost module and the path in it. All objects of the process are looked at,
    which takes some 0.1 s. Call this when an optimizer is prepared or an error is reported, not in a step.

    Example:
        >>> loss = nn.Sequential(nn.PReLU())
        >>> [*module_paths(loss.parameters())]
        ['Sequential.0.weight']
    """
    wanted = {id(param): param for param in params}
    # type() instead of isinstance(), which would run code of proxies and lazy objects.
    modules = [held for held in gc.get_objects() if issubclass(type(held), nn.Module)] if wanted else []
    parents: dict[int, tuple[nn.Module, str]] = {}
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for places, children in ((owners, "_parameters"), (parents, "_modules")):
            for name, child in (vars(module).get(children) or {}).items():
                places.setdefault(id(child), (module, name))
    return {_path(*owners[key], parents): param for key, param in wanted.items() if key in owners}


def _path(module: nn.Module, name: str, parents: dict[int, tuple[nn.Module, str]]) -> str:
    """Return the path of a module's parameter from the outermost module. Wrappers are left out."""
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        parent, key = parents[id(module)]
        if key in _WRAPPED_AS:
            break
        seen.add(id(module))
        module, name = parent, f"{key}.{name}"
    return f"{type(module).__name__}.{name}"
