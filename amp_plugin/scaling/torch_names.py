"""The names of torch.amp.GradScaler that other code reads: getters, setters, private attributes.

Lightning, Accelerate and others check ``isinstance(scaler, torch.amp.GradScaler)`` and touch
``_scale``, ``_device``, ``_lazy_init_scale_growth_tracker`` or ``_per_optimizer_states``.
Nothing of torch's state machine runs: every method is overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling.loss_scale import LossScale, LossScales
from amp_plugin.scaling.loss_scale_options import checked_backoff_factor, checked_growth_factor, whole
from amp_plugin.scaling.per_optimizer import PerOptimizerState
from amp_plugin.scaling.registry import Registry


class OptimizerStates(Mapping[int, Any]):
    """What torch calls ``_per_optimizer_states``: a view of the registry by ``id(optimizer)``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, key: int) -> PerOptimizerState | dict[str, Any]:
        """Return the optimizer's state, or the state of one never met."""
        return self._registry.by_id(key) or {"stage": OptState.READY, "found_inf_per_device": {}}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of the known optimizers."""
        return iter(id(state.optimizer) for state in self._registry)

    def __len__(self) -> int:
        """Return how many optimizers are known."""
        return len(self._registry)


class TorchNames(torch.amp.GradScaler):
    """torch's getters, setters and private names over our loss scales and states."""

    _scales: LossScales
    _registry: Registry

    @property
    def loss_scale(self) -> LossScale:
        """The default loss scale."""
        return self._scales.default

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def get_scale(self, name: str | None = None) -> float:
        """Return the scale as a number, 1.0 if disabled: a host sync.

        Args:
            name: One of the constructor's ``losses``; None for the default scale.
        """
        return self._scales.of(name).item() if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a constant scale."""
        return self.loss_scale.growth_factor if self.loss_scale.options.dynamic else 1.0

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, more than 1."""
        self._dynamic("set_growth_factor").growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a constant scale."""
        return self.loss_scale.backoff_factor if self.loss_scale.options.dynamic else 1.0

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        self._dynamic("set_backoff_factor").backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in optimizer steps; 0 for a constant scale."""
        return self.loss_scale.growth_interval if self.loss_scale.options.dynamic else 0

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval; one that has already passed takes effect at the next good step."""
        self._dynamic("set_growth_interval").growth_interval = whole("growth_interval", new_interval)

    def _dynamic(self, method: str) -> LossScale:
        if not self.loss_scale.options.dynamic:
            msg = f"{method}() needs a dynamic loss scale; this one is constant (dynamic=False)"
            raise TypeError(msg)
        return self.loss_scale

    @property
    def _scale(self) -> Tensor | None:
        return self.loss_scale.value

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self.loss_scale.replace(value)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self.loss_scale.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        self.loss_scale.growth_tracker = value

    @property
    def _init_scale(self) -> float:  # type: ignore[override]
        return self.loss_scale.init_scale

    @property
    def _init_growth_tracker(self) -> int:  # type: ignore[override]
        return self.loss_scale.init_growth_tracker

    @property
    def _growth_factor(self) -> float:  # type: ignore[override]
        return self.get_growth_factor()

    @property
    def _backoff_factor(self) -> float:  # type: ignore[override]
        return self.get_backoff_factor()

    @property
    def _growth_interval(self) -> int:  # type: ignore[override]
        return self.get_growth_interval()

    @property
    def _per_optimizer_states(self) -> OptimizerStates:  # type: ignore[override]
        return OptimizerStates(self._registry)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self.loss_scale.materialize(dev)

    def _get_scale_async(self) -> Tensor | None:
        return self.loss_scale.value

    def _get_growth_tracker(self) -> int:
        return self.loss_scale.tracker() if self._enabled else 0

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        loss_scale = self._scales.require(funcname)
        return loss_scale.require(), loss_scale.require_growth_tracker()

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        state = self._registry.state(optimizer)
        state.begin_call()
        state.check(write=False)
        return state.found_inf_per_device

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        found: dict[Any, Any] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found
