"""The dtypes of a model in training: of weights, of modules' results, of gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.threads import RegionState, current_state
from amp_plugin.formats.layers import format_of
from amp_plugin.numerics.formats import OperandRange, input_range
from amp_plugin.numerics.module_hooks import ModuleHooks, prefixes
from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.weights.compressed_state import bytes_of
from amp_plugin.weights.shard import local_of
from amp_plugin.weights.weight import half_of

Branch = dict[str, Any]
"""A module as a dict: name, kind, dtypes as text, elements, bytes held, and the modules inside it."""


class Survey:
    """Follows the first training step of models, and tells the dtypes in which their modules compute."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._hooks = ModuleHooks(models, self._note)
        self._states: tuple[RegionState, ...] = ()
        self._computes: dict[str, torch.dtype] = {}
        self._formats: dict[str, OperandRange] = {}  # of the inputs of layers below 16 bits
        self._gradients: dict[Tensor, tuple[torch.dtype, int]] = {}
        self._is_over = False

    def open(self) -> None:
        """Start to follow the modules."""
        self._hooks.open()

    def _note(self, name: str, module: nn.Module, given: object, made: object) -> None:
        self._states = self._states or current_state()
        floats = [
            leaf.dtype for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        self._computes.update({name: floats[0]} if floats else {})
        if (chosen := format_of(module)) and name not in self._formats:
            self._formats[name] = input_range(chosen, tree_leaves(given))

    def close(self) -> None:
        """Stop following. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        self._hooks.close()
        for _, model in prefixes(self._models):
            for param in model.parameters():
                if param.grad is not None:
                    self._gradients[param] = param.grad.dtype, bytes_of(param.grad)

    def dtype_of(self, module: str) -> torch.dtype:
        """Return the dtype of a module's gradients: that of its results, else that of the autocast region."""
        lowest = next((state.dtype for state in self._states if state.enabled), torch.float32)
        return self._computes.get(module, lowest)

    def trees(self, optimizers: Iterable[Optimizer]) -> list[Branch]:
        """Return the modules of the models, with the present optimizer state of each."""
        state = {param: entry for optimizer in optimizers for param, entry in optimizer.state.items()}
        return [self._branch(prefix.rstrip("."), model, state) for prefix, model in prefixes(self._models)]

    def _branch(self, path: str, module: nn.Module, state: dict[Tensor, dict[str, object]]) -> Branch:
        params = [param for param in module.parameters(recurse=False) if not is_lazy(param)]
        grads = [self._gradients[param] for param in params if param in self._gradients]
        entries = [entry for param in params for entry in state.get(param, {}).values()]
        kept = [tensor for tensor in entries if isinstance(tensor, Tensor)]
        computes, below = self._computes.get(clean_name(path)), self._formats.get(clean_name(path))
        inside = [
            self._branch(f"{path}.{inner}".lstrip("."), child, state)
            for inner, child in module.named_children()
        ]
        return {
            "name": path.rpartition(".")[2] or "(model)",
            "kind": type(module).__name__,
            "weights": _named(half_of(param).dtype for param in params),
            "computes": below.format if below else "" if computes is None else short_name(computes),
            "numbers": str(below or ""),
            "gradients": _named(dtype for dtype, _ in grads),
            "state": _named(tensor.dtype for tensor in kept if tensor.dim()),
            "parameters": sum(local_of(param).numel() for param in params)
            + sum(part["parameters"] for part in inside),
            "held": bytes_of([*params, *kept])
            + sum(size for _, size in grads)
            + sum(part["held"] for part in inside),
            "inside": inside,
        }


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " ".join(dict.fromkeys(map(short_name, dtypes)))
