"""The dtypes of a model while it trains: of weights, of what modules compute, of gradients and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

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


@dataclass(kw_only=True, slots=True)
class Branch:
    """A module, and those inside it."""

    name: str
    path: str
    kind: str
    weights: str = ""  # a dtype as text, like the next three; empty where there are none
    computes: str = ""
    gradients: str = ""
    state: str = ""
    parameters: int = 0  # elements, with those of the modules inside
    held: int = 0  # bytes of weights, gradients and optimizer state for them
    casts: float | None = None  # per call, with those inside; None if they were not seen
    inside: list[Branch] = field(default_factory=list)


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
        self._gradients: dict[int, tuple[torch.dtype, int]] = {}
        self.is_over = False

    def open(self) -> None:
        """Follow the modules from now on."""
        if not is_compiled(self._model):
            self._rows = self._open.enter_context(module_calls(self._model))
            for module in self._model.modules():
                hook = module.register_forward_pre_hook(self._look_at_region)
                self._open.callback(hook.remove)
            self._log = self._cast_log()

    def _cast_log(self) -> CastLog | None:
        if not native_core().loaded:
            return None
        log = log_casts(self._model)
        try:
            return self._open.enter_context(log)
        except RuntimeError:  # one log can be open in a process
            return None

    def _look_at_region(self, *_: object) -> None:
        self._states = self._states or current_state()

    def close(self) -> None:
        """Stop following; once."""
        if self.is_over:
            return
        self.is_over = True
        self._open.close()
        for param in self._model.parameters():
            if param.grad is not None:
                self._gradients[id(param)] = param.grad.dtype, bytes_of(param.grad)
        for row in self._rows:
            name = clean_name(row.module)
            self._calls[name] += 1
            floats = [dtype for dtype in row.outputs or () if dtype.is_floating_point]
            self._computes.update({name: floats[0]} if floats else {})
        kind = type(self._model).__name__
        for cast in self._log.records() if self._log is not None else ():
            self._casts[clean_name(cast.module.removeprefix(kind).removeprefix("."))] += not cast.cached

    @property
    def sees_casts(self) -> bool:
        """Whether casts were counted."""
        return self._log is not None

    def dtype_of(self, module: str) -> torch.dtype:
        """Return what a module's gradients are made in: its results' dtype, or its region's."""
        lowest = next((state.dtype for state in self._states if state.enabled), torch.float32)
        return self._computes.get(module, lowest)

    def rules_unlike_torchs(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Return, for each device, the ops that the region's rules treat unlike torch's: its rule, ours."""
        sets = {
            state.device_type: state.rules or rules_of(KERNELS.followed[state.device_type])
            for state in self._states
        }
        found = {}
        for device, rules in sets.items():
            torchs = OpRules.default(device)
            found[device] = torchs.diff(rules or torchs)
        return {device: ops for device, ops in found.items() if ops}

    def tree(self, optimizers: Iterable[Optimizer]) -> Branch:
        """Return the model's modules, with what the optimizers hold for them now."""
        states = [optimizer.state for optimizer in optimizers]
        state = {id(param): entry for known in states for param, entry in known.items()}
        return self._branch("", "", self._model, state)

    def _branch(self, name: str, path: str, module: nn.Module, state: dict[int, dict[str, object]]) -> Branch:
        params = list(module.parameters(recurse=False))
        grads = [self._gradients[id(param)] for param in params if id(param) in self._gradients]
        kept = [tensor for param in params for tensor in _tensors(state.get(id(param)))]
        computes = self._computes.get(clean_name(path))
        inside = [
            self._branch(inner, f"{path}.{inner}".lstrip("."), child, state)
            for inner, child in module.named_children()
        ]
        casts = self._casts[clean_name(path)] / max(1, self._calls[clean_name(path)])
        return Branch(
            name=name or "(model)",
            path=path,
            kind=type(module).__name__,
            weights=_named(param.dtype for param in params),
            computes="" if computes is None else short_name(computes),
            gradients=_named(dtype for dtype, _ in grads),
            state=_named(tensor.dtype for tensor in kept if tensor.dim()),
            parameters=sum(local_of(param).numel() for param in params) + sum(b.parameters for b in inside),
            held=bytes_of([*params, *kept])
            + sum(size for _, size in grads)
            + sum(branch.held for branch in inside),
            casts=casts + sum(branch.casts or 0 for branch in inside) if self.sees_casts else None,
            inside=inside,
        )


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has compiled a model or a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _tensors(entry: dict[str, object] | None) -> Iterator[Tensor]:
    yield from (value for value in (entry or {}).values() if isinstance(value, Tensor))


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " ".join(dict.fromkeys(map(short_name, dtypes)))
