"""Know which module runs, by hooks that are there only while somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_OUTSIDE = -1


class ModuleScopes:
    """Number the modules that are called, and tell the native log which one runs in each thread.

    ``when_done`` is called when an outermost module returns, while its arguments are alive.
    """

    def __init__(self, model: nn.Module | None, when_done: Callable[[], None]) -> None:
        self._model = model
        self._when_done = when_done
        self._hooks: list[RemovableHandle] = []
        self._lock = threading.RLock()
        self._paths: list[str] = []
        self._numbers: dict[nn.Module, int] = {}
        self._parameters: dict[int, str] = {}  # address of the TensorImpl -> path
        self._inputs: dict[int, int] = {}  # the same -> calls that hold it
        self._calls = threading.local()

    def open(self) -> None:
        """Place the hooks."""
        if self._model is None:
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
            return
        self._name_children(self._model)
        for module in dict.fromkeys(self._model.modules()):
            self._hooks.append(
                module.register_forward_pre_hook(self._enter_with, prepend=True, with_kwargs=True)
            )
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def path(self, scope: int) -> str:
        """Return a module's path by its number."""
        return self._paths[scope] if scope != _OUTSIDE else ""

    def parameter(self, identity: int) -> str:
        """Return the path of the parameter or buffer at an address, empty if there is none."""
        return self._parameters.get(identity, "")

    def is_input(self, identity: int) -> bool:
        """Return whether the tensor is an argument of an outermost module that runs."""
        return identity in self._inputs

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._enter_with(module, args, {})

    def _enter_with(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():  # Dynamo would trace the book-keeping
            return
        calls = self._open_calls()
        with self._lock:
            if not calls:
                self._name_children(module)
            number = self._numbers.get(module)
            if number is None:  # a module that is no child of the outermost one
                number = self._number(module, type(module).__name__)
            inputs = [] if calls else _addresses((args, kwargs))
            for address in inputs:
                self._inputs[address] = self._inputs.get(address, 0) + 1
        calls.append((module, torch.ops.amp_plugin._cast_log_scope(number), inputs))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if is_compiling():
            return
        calls = self._open_calls()
        if not any(entered is module for entered, _, _ in calls):
            return  # it was entered before the hooks were placed
        while calls:  # what an exception left open is closed with its caller
            left, previous, inputs = calls.pop()
            torch.ops.amp_plugin._cast_log_scope(previous)
            if not calls:
                self._finish(inputs)
            if left is module:
                return

    def _finish(self, inputs: list[int]) -> None:
        with self._lock:
            self._when_done()
            for address in inputs:
                self._inputs[address] -= 1
                if not self._inputs[address]:
                    del self._inputs[address]

    def _open_calls(self) -> list[tuple[nn.Module, int, list[int]]]:
        if not hasattr(self._calls, "open"):
            self._calls.open = []
        calls: list[tuple[nn.Module, int, list[int]]] = self._calls.open
        return calls

    def _name_children(self, root: nn.Module) -> None:
        """Name a module's tree, and its parameters where they are now."""
        kind = type(root).__name__
        if self._model is None or root is self._model:
            for name, module in root.named_modules():
                if module not in self._numbers:
                    self._number(module, f"{kind}.{name}" if name else kind)
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            self._parameters[tensor._cdata] = name

    def _number(self, module: nn.Module, path: str) -> int:
        self._paths.append(path)
        self._numbers[module] = len(self._paths) - 1
        return self._numbers[module]


def _addresses(values: Any) -> list[int]:
    return [value._cdata for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
