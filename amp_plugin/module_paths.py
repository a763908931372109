"""Name parameters after the modules that own them.

A loss can be a module with parameters of its own. Often the user does not pass the loss module to the
framework, although the optimizer updates its parameters. Errors and reports may still have to name these
parameters. All modules are found through Python's garbage collector.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Final

from torch import Tensor, nn

# The attributes in which DistributedDataParallel, torch.compile and Fabric store the wrapped module.
_WRAPPED_AS: Final = {"module", "_orig_mod", "_forward_module", "_original_module"}


def module_paths(params: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return a dict from names to the parameters that belong to modules of this process.

    Parameters that belong to no module are left out. A name consists of the class of the outermost module
    and the parameter's path inside that module. The function scans all objects of the process, which takes
    about 0.1 s. Call this function when an optimizer is prepared or an error is reported, not at every step.

    Example:
        >>> loss = nn.Sequential(nn.PReLU())
        >>> [*module_paths(loss.parameters())]
        ['Sequential.0.weight']
    """
    wanted = {id(param): param for param in params}
    # type() is used because isinstance() would run code of proxies and lazy objects.
    modules = [held for held in gc.get_objects() if issubclass(type(held), nn.Module)] if wanted else []
    parents: dict[int, tuple[nn.Module, str]] = {}
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for places, children in ((owners, "_parameters"), (parents, "_modules")):
            for name, child in (vars(module).get(children) or {}).items():
                places.setdefault(id(child), (module, name))
    return {_path(*owners[key], parents): param for key, param in wanted.items() if key in owners}


def _path(module: nn.Module, name: str, parents: dict[int, tuple[nn.Module, str]]) -> str:
    """Return a parameter's path, starting at the outermost module. Wrappers are left out."""
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        parent, key = parents[id(module)]
        if key in _WRAPPED_AS:
            break
        seen.add(id(module))
        module, name = parent, f"{key}.{name}"
    return f"{type(module).__name__}.{name}"
