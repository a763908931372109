"""Track which module runs, which tensors are weights, how their norms grow, and how many steps have run."""

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

from amp_plugin.numerics.flat_shards import is_flat_unit
from amp_plugin.numerics.growth import is_measurable, largest_growth
from amp_plugin.numerics.values import Storages, norm

# Classes of modules that wrap a model.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
_SHARDED = {"FSDPModule", "ReplicateModule"}


class Tracker:
    """Uses hooks to track module calls, and counts passes and optimizer steps.

    If a model is given, module names are paths in this model. Without a model, module names begin with the
    class of the outermost module that is called. Wrappers such as DistributedDataParallel are left out of the
    names.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.forward_passes = self.backward_passes = 0  # the number of passes that have begun
        self.steps = 0  # the number of optimizer steps that have ended
        self.in_step = False  # whether an optimizer step is running
        self._passes_at_step = 0  # the number of backward passes up to the end of the last optimizer step
        self._is_over = False
        self.sources: Storages[str] = Storages()  # says where each tensor was loaded
        self._model = None if model is None else _unwrapped(model)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._weights: Storages[tuple[weakref.ref[Tensor], str]] = Storages()  # (weight, path) by storage
        self._norms: dict[str, float] = {}  # the norm of each parameter when it was first measured
        self._running = threading.local()
        self._last_task = -1

    def open(self, stack: ExitStack) -> None:
        """Register hooks on all modules. Closing ``stack`` removes the hooks."""
        if self._model is not None:
            self._name_tree(self._model, prefix="")
        stack.callback(register_module_forward_pre_hook(self._enter).remove)
        stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def current(self) -> str:
        """Return the path of the innermost module running in this thread, or ``""`` outside modules."""
        module = self.running()
        return "" if module is None else self.name_of(module)

    def running(self) -> nn.Module | None:
        """Return the innermost module running in this thread, or None outside modules."""
        modules = self._modules()
        return modules[-1] if modules else None

    def name_of(self, module: nn.Module) -> str:
        """Return the path of a module, or the name of its class if no path is known."""
        return self._names.get(module, _class_of(module))

    def address(self, path: str) -> tuple[str, str]:
        """Return the class name of the model, and the path of the module for ``model.get_submodule``."""
        if self._model is not None:
            return _class_of(self._model), path
        model, _, inner = path.partition(".")
        return model, inner

    def _modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = self._running.__dict__.setdefault("modules", [])
        return modules

    def _enter(self, module: nn.Module, _: Any) -> None:
        modules = self._modules()
        if not modules:
            model = _unwrapped(module)
            prefix = self._names[model] if model in self._names else _class_of(model)
            self._name_tree(model, prefix=prefix)
            self._names.setdefault(module, prefix)
            # Recomputation by activation checkpointing in a backward pass does not count as a forward pass.
            self.forward_passes += torch._C._current_graph_task_id() == -1
        modules.append(module)

    def flat_units(self) -> list[nn.Module]:
        """Return the modules that FSDP1 wraps."""
        return [module for module in self._names if is_flat_unit(module)]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        modules = self._modules()
        if module in modules:  # this also removes inner modules whose forward pass raised an error
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
        """Return the path of the parameter or buffer that uses a tensor's storage, or ``""`` if none does."""
        found = self._weights.get(tensor)
        return found[1] if found else ""

    def growth(self) -> float:
        """Return the largest factor by which the norm of a weight has grown since it was first measured."""
        weights = self._weights.alive() if self.steps else ()
        return largest_growth((weight(), self._norms.get(path, math.nan)) for weight, path in weights)

    def in_backward(self, task: int) -> None:
        """Count a backward pass at its first op.

        Autograd gives each backward pass a larger number than the previous backward pass.
        """
        if task > self._last_task:
            self._last_task = task
            self.backward_passes += 1

    def now(self) -> str:
        """Return a string that says how many passes and steps have run since the region began.

        Skipped steps do not count.
        """
        passes = {"forward pass": self.forward_passes, "backward pass": self.backward_passes}
        begun = [f"{name} {number}" for name, number in passes.items() if number]
        is_between = not self.in_step and self.backward_passes == self._passes_at_step
        is_after = self.steps > 0 and is_between and (self._is_over or not torch.is_grad_enabled())
        step = f"after optimizer step {self.steps}" if is_after else f"optimizer step {self.steps + 1}"
        return ", ".join([*begun, step])

    def ends(self) -> None:
        """Record that the program has ended, so no optimizer step will follow."""
        self._is_over = True

    def step_begins(self, _: Optimizer) -> None:
        """Note that an optimizer step begins."""
        self.in_step = True

    def step_ended(self, _: Optimizer) -> None:
        """Count an optimizer step."""
        self.in_step = False
        self.steps += 1
        self._passes_at_step = self.backward_passes


def _class_of(module: nn.Module) -> str:
    """Return the name of a module's original class, even if ``fully_shard`` changed the class."""
    kinds = type(module).__mro__
    return kinds[2 if kinds[1].__name__ in _SHARDED else 0].__name__


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, "_orig_mod" if hasattr(module, "_orig_mod") else "module")
    return module


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers, such as the statistics of batch norm, to their values before the block."""
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
                own[name] = buffer  # a forward pass may have replaced the buffer with another tensor
                buffer.copy_(value)
