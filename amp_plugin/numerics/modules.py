"""Which module runs, which weight a tensor is and how it has grown, and how far the program has come."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from amp_plugin.numerics.growth import growth_of, is_measurable
from amp_plugin.numerics.values import Storages, norm

# Modules around a model that are made after it.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}


class Tracker:
    """Follow the modules that are called, by hooks placed between open and close, and optimizers' steps.

    Names are those of a given model; else of whatever outermost module is called, its class in front, without
    wrappers such as DistributedDataParallel.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.forward_passes = self.backward_passes = 0  # how many have begun
        self.steps = 0  # how many optimizers have finished
        self.in_step = False  # whether an optimizer's step runs
        self._passes_at_step = 0  # backward passes that had begun when the last step ended
        self._is_over = False
        self.sources: Storages[str] = Storages()  # where tensors were loaded
        self._model = None if model is None else _unwrapped(model)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._weights: Storages[tuple[weakref.ref[Tensor], str]] = Storages()  # with their paths
        self._norms: dict[str, float] = {}  # of parameters when they were first seen
        self._running = threading.local()
        self._last_task = -1

    def open(self, stack: ExitStack) -> None:
        """Place hooks that a stack removes."""
        if self._model is not None:
            self._name_tree(self._model, prefix="")
        stack.callback(register_module_forward_pre_hook(self._enter).remove)
        stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def current(self) -> str:
        """Return the path of the innermost module that runs in this thread; empty outside of modules."""
        modules = self._modules()
        return self.name_of(modules[-1]) if modules else ""

    def name_of(self, module: nn.Module) -> str:
        """Return the path of a module, or its class if it was never called."""
        return self._names.get(module, type(module).__name__)

    def address(self, path: str) -> tuple[str, str]:
        """Return the class of a module's model, and the path that its ``get_submodule`` takes."""
        if self._model is not None:
            return type(self._model).__name__, path
        model, _, inner = path.partition(".")
        return model, inner

    def _modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = self._running.__dict__.setdefault("modules", [])
        return modules

    def _enter(self, module: nn.Module, _: Any) -> None:
        modules = self._modules()
        if not modules:
            model = _unwrapped(module)
            prefix = self._names[model] if model in self._names else type(model).__name__
            self._name_tree(model, prefix=prefix)
            self._names.setdefault(module, prefix)
            # recomputation in a backward pass is not a call by the program
            self.forward_passes += torch._C._current_graph_task_id() == -1
        modules.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        modules = self._modules()
        if module in modules:  # what an error left open is closed with its caller
            while modules.pop() is not module:
                pass

    def _name_tree(self, root: nn.Module, *, prefix: str) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, f"{prefix}.{name}".strip("."))
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if not self.weight(tensor):
                path = f"{prefix}.{name}".strip(".")
                self._weights.set(tensor, (weakref.ref(tensor), path))
                if is_measurable(tensor):
                    self._norms.setdefault(path, norm(tensor))

    def weight(self, tensor: Tensor) -> str:
        """Return the path of the parameter or buffer that has the tensor's storage; empty if none has."""
        found = self._weights.get(tensor)
        return found[1] if found else ""

    def growth(self) -> float:
        """Return by which factor the weights that grew most have grown since they were first seen."""
        most = 1.0
        for reference, name in self._weights.alive() if self.steps else ():
            tensor, begun = reference(), self._norms.get(name, math.nan)
            if is_measurable(tensor) and not math.isnan(begun):
                most = max(most, growth_of(tensor, begun))
        return most

    def in_backward(self, task: int) -> None:
        """Count a backward pass by its first op; autograd's number of a later pass is larger."""
        if task > self._last_task:
            self._last_task = task
            self.backward_passes += 1

    def now(self) -> str:
        """Return how far the program is since the region began; a step that a scaler skips is none."""
        passes = {"forward pass": self.forward_passes, "backward pass": self.backward_passes}
        begun = [f"{name} {number}" for name, number in passes.items() if number]
        is_between = not self.in_step and self.backward_passes == self._passes_at_step
        is_after = self.steps > 0 and is_between and (self._is_over or not torch.is_grad_enabled())
        step = f"after optimizer step {self.steps}" if is_after else f"optimizer step {self.steps + 1}"
        return ", ".join([*begun, step])

    def ends(self) -> None:
        """Note that nothing of a further step comes."""
        self._is_over = True

    def step_begins(self, _: Optimizer) -> None:
        """Take note of an optimizer that is about to step."""
        self.in_step = True

    def step_ended(self, _: Optimizer) -> None:
        """Count a step."""
        self.in_step = False
        self.steps += 1
        self._passes_at_step = self.backward_passes


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, "_orig_mod" if hasattr(module, "_orig_mod") else "module")
    return module


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back what forward passes write into buffers, such as the statistics of batch norm."""
    before = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for own, name, buffer, value in before:
                own[name] = buffer  # a pass may put another in its place
                buffer.copy_(value)
