"""Which module runs, by its path, and which weight a tensor is."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.numerics.storages import storage_address


class ModulePaths:
    """Follow the modules that are called, by hooks that are there only between open and close.

    Args:
        model: gives the names; default: whatever outermost module is called, its class in front.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
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

    def depth(self) -> int:
        """Return how many modules run in this thread, one in another."""
        return len(self._modules())

    def weight(self, tensor: Tensor) -> str:
        """Return the path of the parameter or buffer that has the tensor's storage; empty if none has."""
        found = self._weights.get(storage_address(tensor))
        owner = found[0]() if found else None
        same = owner is not None and storage_address(owner) == storage_address(tensor)
        return found[1] if found and same else ""

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
        modules.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        modules = self._modules()
        if module in modules:  # what an error left open is closed with its caller
            while modules.pop() is not module:
                pass

    def _name_tree(self, root: nn.Module, *, prefix: str) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, _joined(prefix, name))
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if (address := storage_address(tensor)) and not self.weight(tensor):
                self._weights[address] = (weakref.ref(tensor), _joined(prefix, name))


def _joined(prefix: str, name: str) -> str:
    return ".".join(filter(None, (prefix, name)))
