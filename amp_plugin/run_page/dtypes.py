"""Find the dtypes of a model's weights, module results, gradients and optimizer state in training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.threads import RegionState, current_state
from amp_plugin.formats.layers import format_of
from amp_plugin.messages import only_warning
from amp_plugin.numerics.formats import OperandRange, input_range
from amp_plugin.numerics.module_hooks import ModuleHooks, prefixes
from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.weights.compressed_state import bytes_of
from amp_plugin.weights.shard import local_of
from amp_plugin.weights.weight import half_of

Branch = dict[str, Any]
"""A module as a dict with its name, class, dtypes, number of parameters, bytes and submodules."""

# Matches the autograd nodes of matrix products, convolutions, recurrent layers and attention.
_PRODUCT: Final = re.compile(
    r"((Sparse)?(Mm|Addmm|Addbmm|Bmm|Baddbmm|Mv|Addmv|Dot|Linear)|\w*Convolution\w*|\w*Rnn\w*|ScaledDot\w*)Backward\d*"
)
_MOST_NODES: Final = 20_000  # at most this many graph nodes are visited per module


class Survey:
    """Watches the first training step of models, and reports the dtypes in which their modules compute.

    A module is said to compute in the dtype of its matrix products and convolutions, including those of its
    submodules. A module that has neither matrix products nor convolutions is said to compute in the dtype of
    its first result.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._hooks = ModuleHooks(models, self._note)
        self._states: tuple[RegionState, ...] = ()
        self._results: dict[str, torch.dtype] = {}
        self._products: dict[str, list[torch.dtype]] = {}  # dtypes of matrix products by module name
        self._formats: dict[str, OperandRange] = {}  # input ranges of layers that compute below 16 bits
        self._gradients: dict[Tensor, tuple[torch.dtype, int]] = {}
        self._is_over = False

    def open(self) -> None:
        """Start to watch the modules."""
        self._hooks.open()

    def _note(self, name: str, module: nn.Module, given: object, made: object) -> None:
        with only_warning("the survey of dtypes", self._hooks.close):
            self._take(name, module, given, made)

    def _take(self, name: str, module: nn.Module, given: object, made: object) -> None:
        self._states = self._states or current_state()
        floats = [
            leaf.dtype for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        self._results.update({name: floats[0]} if floats else {})
        if name not in self._products and next(module.parameters(recurse=False), None) is not None:
            self._products[name] = _product_dtypes(tree_leaves(made), tree_leaves(given))
        if (chosen := format_of(module)) and name not in self._formats:
            self._formats[name] = input_range(chosen, tree_leaves(given))

    def close(self) -> None:
        """Stop watching the modules. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        self._hooks.close()
        for _, model in prefixes(self._hooks.models):
            for param in model.parameters():
                if param.grad is not None:
                    self._gradients[param] = param.grad.dtype, bytes_of(param.grad)

    def dtype_of(self, module: str) -> torch.dtype:
        """Return the dtype in which a module's gradients are computed.

        Gradients are computed in the dtype of the module's outputs. If the dtype of the outputs is not known,
        the dtype of the autocast region is returned.
        """
        lowest = next((state.dtype for state in self._states if state.enabled), torch.float32)
        return self._results.get(module, lowest)

    def trees(self, optimizers: Iterable[Optimizer]) -> list[Branch]:
        """Return the module tree of each model, with the dtypes of the current optimizer state."""
        state = {param: entry for optimizer in optimizers for param, entry in optimizer.state.items()}
        return [
            self._branch(prefix.rstrip("."), model, state) for prefix, model in prefixes(self._hooks.models)
        ]

    def _branch(self, path: str, module: nn.Module, state: dict[Tensor, dict[str, object]]) -> Branch:
        children = [(f"{path}.{inner}".lstrip("."), child) for inner, child in module.named_children()]
        params = [param for param in module.parameters(recurse=False) if not is_lazy(param)]
        name = clean_name(path)
        if not params and [clean_name(inner) for inner, _ in children] == [name]:
            return self._branch(*children[0], state)  # a wrapper, such as a compiled module, has no row
        grads = [self._gradients[param] for param in params if param in self._gradients]
        entries = [entry for param in params for entry in state.get(param, {}).values()]
        kept = [tensor for tensor in entries if isinstance(tensor, Tensor)]
        below, result = self._formats.get(name), [self._results[name]] if name in self._results else []
        inside = [self._branch(inner, child, state) for inner, child in children]
        within = [dtype for part in inside for dtype in part["products"]]
        products = [*dict.fromkeys([*self._products.get(name, []), *within])]
        return {
            "name": name.rpartition(".")[2] or "(model)",
            "kind": type(module).__name__,
            "weights": _named(half_of(param).dtype for param in params),
            "computes": below.format if below else _named(products or result),
            "products": products,
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


def _product_dtypes(made: Sequence[object], given: Sequence[object]) -> list[torch.dtype]:
    """Return the distinct dtypes of the matrix products that compute a module's results from its inputs.

    The dtypes are read from the autograd graph. The list is empty if there is no graph, for example in
    compiled code, or if the module multiplies no matrices.
    """

    def nodes_of(values: Sequence[object]) -> list[Any]:
        return [leaf.grad_fn for leaf in values if isinstance(leaf, Tensor) and leaf.grad_fn is not None]

    found: dict[torch.dtype, None] = {}
    waiting, seen = nodes_of(made), {*nodes_of(given)}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if _PRODUCT.fullmatch(node.name()):
            # The gradient that an autograd node receives has the dtype of the op's result.
            found[node._input_metadata[0].dtype] = None
        waiting += [before for before, _ in node.next_functions if before is not None]
    return [*found]


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " ".join(dict.fromkeys(map(short_name, dtypes)))
