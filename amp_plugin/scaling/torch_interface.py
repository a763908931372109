"""The names of torch.amp.GradScaler that other code reads: getters, setters, private attributes.

Lightning, Accelerate and others check ``isinstance(scaler, torch.amp.GradScaler)`` and touch
``_scale``, ``_device``, ``_lazy_init_scale_growth_tracker`` or ``_per_optimizer_states``.
Nothing of torch's state machine runs: every method is overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    checked_backoff_factor,
    checked_growth_factor,
    whole,
)

if TYPE_CHECKING:
    from amp_plugin.scaling.registry import OptimizerRecord, Registry


class OptimizerStates(Mapping[int, Any]):
    """What torch calls ``_per_optimizer_states``: a view of the registry by ``id(optimizer)``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, key: int) -> OptimizerRecord | dict[str, Any]:
        """Return the optimizer's record, or the state of one never met."""
        return self._registry.by_id(key) or {"stage": OptState.READY, "found_inf_per_device": {}}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the ids of the known optimizers."""
        return iter(id(record.optimizer) for record in self._registry)

    def __len__(self) -> int:
        """Return how many optimizers are known."""
        return len(self._registry)


class TorchInterface(torch.amp.GradScaler):
    """torch's getters, setters and private names over a :class:`LossScale`."""

    _loss_scale: LossScale
    _loss_scales: dict[str, LossScale]
    _registry: Registry

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self._enabled

    def get_scale(self, name: str | None = None) -> float:
        """Return the scale as a number, 1.0 if disabled: a host sync.

        Args:
            name: One of the constructor's ``losses``; None for the default scale.
        """
        return self._loss_scale_of(name).item() if self._enabled else 1.0

    def _loss_scale_of(self, name: str | None) -> LossScale:
        if name is None:
            return self._loss_scale
        if name not in self._loss_scales:
            known = ", ".join(self._loss_scales) or "none"
            msg = f"loss {name!r} is not known; the constructor's losses= named: {known}"
            raise ValueError(msg)
        return self._loss_scales[name]

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a constant scale."""
        return self._loss_scale.growth_factor if isinstance(self._loss_scale, DynamicLossScale) else 1.0

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, more than 1."""
        self._dynamic("set_growth_factor").growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a constant scale."""
        return self._loss_scale.backoff_factor if isinstance(self._loss_scale, DynamicLossScale) else 1.0

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        self._dynamic("set_backoff_factor").backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in optimizer steps; 0 for a constant scale."""
        return self._loss_scale.growth_interval if isinstance(self._loss_scale, DynamicLossScale) else 0

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval; one that has already passed takes effect at the next good step."""
        self._dynamic("set_growth_interval").growth_interval = whole("growth_interval", new_interval)

    def _dynamic(self, method: str) -> DynamicLossScale:
        if not isinstance(self._loss_scale, DynamicLossScale):
            msg = f"{method}() needs a dynamic loss scale; this one is constant (dynamic=False)"
            raise TypeError(msg)
        return self._loss_scale

    @property
    def _scale(self) -> Tensor | None:
        return self._loss_scale.value

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._loss_scale.value = value
        self._loss_scale.generation += 1

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._loss_scale.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        self._loss_scale.growth_tracker = value

    @property
    def _init_scale(self) -> float:  # type: ignore[override]
        return self._loss_scale.init_scale

    @property
    def _init_growth_tracker(self) -> int:  # type: ignore[override]
        return self._loss_scale.init_growth_tracker

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
        self._loss_scale.materialize(dev)

    def _get_scale_async(self) -> Tensor | None:
        return self._loss_scale.value

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.tracker() if self._enabled else 0

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        loss_scale = self._first_materialized()
        if loss_scale is None:
            msg = (
                f"Attempted {funcname} but _scale is None. Call scaler.scale(loss).backward() "
                "earlier in the iteration."
            )
            raise RuntimeError(msg)
        if loss_scale.growth_tracker is None:
            loss_scale.growth_tracker = torch.zeros((), dtype=torch.int32, device=loss_scale.require().device)
        return loss_scale.require(), loss_scale.growth_tracker

    def _first_materialized(self) -> LossScale | None:
        if self._loss_scale.value is not None:
            return self._loss_scale
        return next((one for one in self._loss_scales.values() if one.value is not None), None)

    def _all_loss_scales(self) -> list[LossScale]:
        return [self._loss_scale, *self._loss_scales.values()]

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        found: dict[Any, Any] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found
