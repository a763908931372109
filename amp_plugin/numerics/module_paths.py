"""Which module runs, by its path, and which weight a tensor is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.numerics.storages import storage_address

# Modules around a model that are made after it -> the attribute that holds it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAddress:
    """Where a module is found in its model.

    Attributes:
        model: class of the model; wrappers such as DistributedDataParallel are not counted.
        path: as ``model.get_submodule`` takes it; empty for the model itself.
        is_of_lightning: the model is a LightningModule.
    """

    model: str = ""
    path: str = ""
    is_of_lightning: bool = False


_UNKNOWN = ModuleAddress()


class ModulePaths:
    """Follow the modules that are called, by hooks that are there only between open and close.

    Args:
        model: gives the names; default: whatever outermost module is called, its class in front.
        on_model: called with each outermost module that is called.
    """

    def __init__(
        self, model: nn.Module | None = None, on_model: Callable[[nn.Module], object] | None = None
    ) -> None:
        self._model = model
        self._on_model = on_model or _ignore
        self._addresses: dict[str, ModuleAddress] = {}
        self._hooks: list[RemovableHandle] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._weights: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # storage -> tensor, path
        self._running = threading.local()

    def open(self) -> None:
        """Place the hooks."""
        if self._model is not None:
            self._name_tree(self._model, prefix="")
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def current(self) -> str:
        """Return the path of the innermost module that runs in this thread; empty outside of modules."""
        modules = self._modules()
        return self._names.get(modules[-1], type(modules[-1]).__name__) if modules else ""

    def address(self, path: str) -> ModuleAddress:
        """Return where the module of a path, as ``current`` returned it, is found in its model."""
        return self._addresses.get(path, _UNKNOWN)

    def depth(self) -> int:
        """Return how many modules run in this thread, one in another."""
        return len(self._modules())

    def weight(self, tensor: Tensor) -> str:
        """Return the path of the parameter or buffer that has the tensor's storage; empty if none has."""
        found = self._weights.get(storage_address(tensor))
        owner = found[0]() if found else None
        same = owner is not None and storage_address(owner) == storage_address(tensor)
        return found[1] if found and same else ""

    def largest_weight(self, path: str) -> float:
        """Return the largest absolute value of a module's own parameters and buffers; 0 without any."""
        tensors = (
            reference() for reference, name in self._weights.values() if name.rpartition(".")[0] == path
        )
        sizes = (tensor.detach().abs().max() for tensor in tensors if _is_measurable(tensor))
        return max((float(size) for size in sizes), default=0.0)

    def _modules(self) -> list[nn.Module]:
        if not hasattr(self._running, "modules"):
            self._running.modules = []
        modules: list[nn.Module] = self._running.modules
        return modules

    def _enter(self, module: nn.Module, _: Any) -> None:
        modules = self._modules()
        if not modules:
            known = module in self._names
            self._name_tree(module, prefix=self._names[module] if known else type(module).__name__)
            self._on_model(module)
        modules.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        modules = self._modules()
        if module in modules:  # what an error left open is closed with its caller
            while modules.pop() is not module:
                pass

    def _name_tree(self, root: nn.Module, *, prefix: str) -> None:
        model, skipped = _unwrapped(root)
        is_of_lightning = any(kind.__name__ == "LightningModule" for kind in type(model).__mro__)
        for name, module in root.named_modules():
            path = self._names.setdefault(module, _joined(prefix, name))
            if path not in self._addresses:
                self._addresses[path] = ModuleAddress(
                    model=type(model).__name__,
                    path=name.removeprefix(skipped).removeprefix("."),
                    is_of_lightning=is_of_lightning,
                )
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if (address := storage_address(tensor)) and not self.weight(tensor):
                self._weights[address] = (weakref.ref(tensor), _joined(prefix, name))


def _unwrapped(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the model inside of wrappers, and its path in them."""
    skipped = ""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        module, skipped = getattr(module, attribute), _joined(skipped, attribute)
    return module, skipped


def _is_measurable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0


def _ignore(module: nn.Module) -> None:
    """Do nothing when a module is called."""


def _joined(prefix: str, name: str) -> str:
    return ".".join(filter(None, (prefix, name)))
