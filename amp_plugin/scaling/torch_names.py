"""The names of torch.amp.GradScaler that other code reads: getters, setters, private attributes.

Lightning, Accelerate and others check ``isinstance(scaler, torch.amp.GradScaler)`` and touch
``_scale``, ``_device``, ``_lazy_init_scale_growth_tracker`` or ``_per_optimizer_states``.
Nothing of torch's state machine runs: every method that does more than read these is overridden. A program's
own ``_unscale_grads_`` or ``_maybe_opt_step`` is called where torch.amp calls it.
"""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.options import between, whole
from amp_plugin.scaling.core import ScalerCore
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.step_log import StepLog


def _of_loss_scale(name: str) -> Any:
    """Return a property for an attribute of the default loss scale; programs also set torch's."""
    return property(attrgetter(f"loss_scale.{name}"), lambda self, new: setattr(self.loss_scale, name, new))


class TorchNames(torch.amp.GradScaler):
    """torch's getters, setters and private names over our loss scales and states."""

    core: ScalerCore

    _enabled = property(
        lambda self: self.core.shared.scales.enabled,
        lambda self, enabled: setattr(self.core.shared.scales, "enabled", bool(enabled)),
    )
    _device = property(
        lambda self: self.core.device, lambda self, device: setattr(self.core, "device", device)
    )
    _scale = property(lambda self: self.loss_scale.value, lambda self, value: self.loss_scale.replace(value))
    _growth_tracker = _of_loss_scale("growth_tracker")
    _growth_factor = _of_loss_scale("growth_factor")
    _backoff_factor = _of_loss_scale("backoff_factor")
    _growth_interval = _of_loss_scale("growth_interval")
    _init_scale = _of_loss_scale("init_scale")
    _init_growth_tracker = _of_loss_scale("init_growth_tracker")

    @property
    def loss_scale(self) -> LossScale:
        """The default loss scale."""
        return self.core.shared.scales.default

    def is_enabled(self) -> bool:
        """Return whether losses are scaled; a disabled scaler still checks gradients and skips steps."""
        return self.core.shared.scales.enabled

    @property
    def step_log(self) -> StepLog:
        """The log of its steps, for adapters."""
        return self.core.log

    def get_scale(self, name: str | None = None) -> float:
        """Return the scale as a number, 1.0 if disabled: a host sync.

        Args:
            name: One of the constructor's ``losses``; None for the default scale.
        """
        return self.core.shared.scales.of(name).item() if self.is_enabled() else 1.0

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a constant scale."""
        return self.loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, more than 1."""
        self._dynamic("set_growth_factor").growth_factor = between("growth_factor", new_factor, 1)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a constant scale."""
        return self.loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        self._dynamic("set_backoff_factor").backoff_factor = between("backoff_factor", new_factor, 0, 1)

    def get_growth_interval(self) -> int:
        """Return the growth interval in optimizer steps; 0 for a constant scale."""
        return self.loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval; one that has already passed takes effect at the next good step."""
        self._dynamic("set_growth_interval").growth_interval = whole("growth_interval", new_interval)

    def _dynamic(self, method: str) -> LossScale:
        if not self.loss_scale.options.dynamic:
            msg = f"{method}() needs a dynamic loss scale; this one is constant (dynamic=False)"
            raise TypeError(msg)
        return self.loss_scale

    @property
    def _per_optimizer_states(self) -> dict[int, Any]:  # type: ignore[override]
        never_met = {"stage": OptState.READY, "found_inf_per_device": {}}
        return defaultdict(lambda: never_met, {id(state.optimizer): StateView(state) for state in self.core})

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self.loss_scale.materialize(dev)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        state = self.core.state(optimizer)
        state.begin_call()
        state.measure(unscale=False)
        return state.found_inf_per_device


class StateView(dict[str, Any]):
    """torch's per-optimizer dict over our state: ``"stage"`` and ``"found_inf_per_device"``."""

    def __init__(self, state: OptimizerState) -> None:
        found = state.found_inf_per_device
        if state.stage is OptState.STEPPED and state.result is not None:
            found = {state.result.found_inf.device: state.result.found_inf}
        super().__init__(stage=state.stage, found_inf_per_device=found)
