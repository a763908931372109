"""The dtypes of a model while it trains: of weights, of what modules compute, of gradients and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.casting.cast_log import CastLog, log_casts
from amp_plugin.casting.dispatcher import KERNELS, rules_of
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.threads import RegionState, current_state
from amp_plugin.kernels.build import native_core
from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.sharding.report import ModuleDtypes, module_calls
from amp_plugin.weights.compressed_state import bytes_of, local_of

Branch = dict[str, Any]
"""A module: its name, kind, dtypes as text, elements, bytes held, casts per call, and those inside it."""


class Survey:
    """Follow a model's first training step, and say what its modules compute in."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open = ExitStack()
        self._rows: list[ModuleDtypes] = []
        self._log: CastLog | None = None
        self._states: tuple[RegionState, ...] = ()
        self._calls: Counter[str] = Counter()
        self._casts: Counter[str] = Counter()
        self._computes: dict[str, torch.dtype] = {}
        self._gradients: dict[Tensor, tuple[torch.dtype, int]] = {}
        self._is_over = False

    def open(self) -> None:
        """Follow the modules from now on."""
        if is_compiled(self._model):
            return
        self._rows = self._open.enter_context(module_calls(self._model))
        for module in self._model.modules():
            self._open.callback(module.register_forward_pre_hook(self._look_at_region).remove)
        if native_core().loaded:
            with suppress(RuntimeError):  # one log can be open in a process
                self._log = self._open.enter_context(log_casts(self._model))

    def _look_at_region(self, *_: object) -> None:
        self._states = self._states or current_state()

    def close(self) -> None:
        """Stop following; once."""
        if self._is_over:
            return
        self._is_over = True
        self._open.close()
        for param in self._model.parameters():
            if param.grad is not None:
                self._gradients[param] = param.grad.dtype, bytes_of(param.grad)
        for row in self._rows:
            name = clean_name(row.module)
            self._calls[name] += 1
            floats = [dtype for dtype in row.outputs or () if dtype.is_floating_point]
            self._computes.update({name: floats[0]} if floats else {})
        kind = type(self._model).__name__
        for cast in self._log.records() if self._log is not None else ():
            self._casts[clean_name(cast.module.removeprefix(kind).removeprefix("."))] += not cast.cached

    def dtype_of(self, module: str) -> torch.dtype:
        """Return what a module's gradients are made in: its results' dtype, or its region's."""
        lowest = next((state.dtype for state in self._states if state.enabled), torch.float32)
        return self._computes.get(module, lowest)

    def rules_unlike_torchs(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Return, for each device, the ops that the region's rules treat unlike torch's: its rule, ours."""
        found = {}
        for state in self._states:
            torchs = OpRules.default(state.device_type)
            rules = state.rules or rules_of(KERNELS.followed[state.device_type]) or torchs
            found[state.device_type] = torchs.diff(rules)
        return {device: ops for device, ops in found.items() if ops}

    def tree(self, optimizers: Iterable[Optimizer]) -> Branch:
        """Return the model's modules, with what the optimizers hold for them now."""
        state = {param: entry for optimizer in optimizers for param, entry in optimizer.state.items()}
        return self._branch("", self._model, state)

    def _branch(self, path: str, module: nn.Module, state: dict[Tensor, dict[str, object]]) -> Branch:
        params = list(module.parameters(recurse=False))
        grads = [self._gradients[param] for param in params if param in self._gradients]
        entries = [entry for param in params for entry in state.get(param, {}).values()]
        kept = [tensor for tensor in entries if isinstance(tensor, Tensor)]
        name, computes = clean_name(path), self._computes.get(clean_name(path))
        inside = [
            self._branch(f"{path}.{inner}".lstrip("."), child, state)
            for inner, child in module.named_children()
        ]
        casts = self._casts[name] / max(1, self._calls[name])
        return {
            "name": path.rpartition(".")[2] or "(model)",
            "kind": type(module).__name__,
            "weights": _named(param.dtype for param in params),
            "computes": "" if computes is None else short_name(computes),
            "gradients": _named(dtype for dtype, _ in grads),
            "state": _named(tensor.dtype for tensor in kept if tensor.dim()),
            "parameters": sum(local_of(param).numel() for param in params)
            + sum(part["parameters"] for part in inside),
            "held": bytes_of([*params, *kept])
            + sum(size for _, size in grads)
            + sum(part["held"] for part in inside),
            "casts": None if self._log is None else casts + sum(part["casts"] for part in inside),
            "inside": inside,
        }


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has compiled a model or a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " ".join(dict.fromkeys(map(short_name, dtypes)))
