"""Shared holds the loss scales, ranks and options that all optimizers of a scaler use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from amp_plugin.options import LossScaleOptions, Spike
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.loss_scale import HYSTERESIS, LossScale
from amp_plugin.scaling.ranks import Ranks
from amp_plugin.scaling.spikes import Spikes
from amp_plugin.scaling.words import PLAIN, Words

OUR_KEY = "amp_plugin"
"""The key of our own part of a state dict. If no loss is scaled, it is the only key."""


class Shared:
    """The state that all optimizers of a scaler share.

    Args:
        options: The options for loss scaling and optimizer steps.
        losses: The names of losses that have their own loss scale.
        ranks: The processes that decide together.
        device: The device type.
        enabled: True if losses are scaled.

    Attributes:
        scales: Maps the name of a loss to its loss scale. The name None stands for the default loss scale.
        ranks: As given.
        device: As given.
        enabled: As given.
        words: How error messages write calls such as ``step``, for the framework in use.
        scales_all: True if the entry point, such as Lightning, runs every scaled backward pass itself. If the
            user's program calls ``loss.backward()`` itself, the gradients are then unscaled.
        spikes: Judges whether a step is a spike.
        updates: The number of updates that have been requested. After an update, all optimizers are in the
            stage READY again.
        has_checked: True if gradients were checked since the last requested update.
        awaits_update: True if an update has been requested, but gradients still depend on the old loss scale.
    """

    def __init__(
        self, options: LossScaleOptions, losses: Sequence[str], ranks: Ranks, *, device: str, enabled: bool
    ) -> None:
        if isinstance(losses, str) or len(set(losses)) < len(losses):
            msg = f"losses={losses!r} is not allowed; give a list of different names, as ['pixel', 'edges']"
            raise ValueError(msg)
        self.scales: dict[str | None, LossScale] = {name: LossScale(options) for name in (None, *losses)}
        self.ranks, self.device, self.enabled, self.words = ranks, device, enabled, PLAIN
        self.scales_all = False
        self.updates = 0
        self.has_checked = self.awaits_update = False
        self.spikes = Spikes(cast("Spike | None", options.on_spike))

    @property
    def default(self) -> LossScale:
        """The loss scale of losses without a name."""
        return self.scales[None]

    @property
    def options(self) -> LossScaleOptions:
        """The options that the scaler was made with."""
        return self.default.options

    @property
    def checks(self) -> bool:
        """Whether gradients are checked even if no loss is scaled."""
        return self.options.on_nonfinite != "ignore"

    def enable(self, enabled: bool) -> None:
        """Start or stop scaling losses."""
        self.enabled = enabled

    def place(self, device: str, ranks: Ranks) -> None:
        """Set the device and the ranks."""
        self.device, self.ranks = device, ranks

    def speak(self, words: Words) -> None:
        """Use the scaler for an entry point that runs every scaled backward pass itself.

        Args:
            words: How users of the entry point write each call, such as ``scaler.step(optimizer)``. Error
                messages mention calls in this way.
        """
        self.words, self.scales_all = words, True

    def end_stages(self) -> None:
        """Set all optimizers to the stage READY, as an update does, so that each of them may step again."""
        self.updates += 1

    def request_update(self) -> None:
        """Count a requested update. The next update needs a new check of gradients."""
        self.end_stages()
        self.has_checked, self.awaits_update = False, True

    def end_update(self) -> None:
        """Record that the requested update was applied."""
        self.awaits_update = False

    def note_check(self) -> None:
        """Record that gradients were checked for inf and nan, so that an update may follow."""
        self.has_checked = True

    def scale_of(self, name: str | None) -> LossScale:
        """Return the loss scale for losses with this name. None stands for the default loss scale."""
        if name not in self.scales:
            known = ", ".join(filter(None, self.scales)) or "none"
            msg = f"loss {name!r} is not known; the constructor's losses= named: {known}"
            raise ValueError(msg)
        return self.scales[name]

    def used_scales(self) -> list[LossScale]:
        """Return the loss scales that have been used to scale a loss."""
        return [scale for scale in self.scales.values() if scale.value is not None]

    @property
    def scale_device(self) -> torch.device | None:
        """The device that holds the loss scales; None if no loss scale has been used."""
        return next((scale.require().device for scale in self.used_scales()), None)

    def device_for(self, params: Sequence[Tensor]) -> torch.device:
        """Return the device on which the norm and the overflow flag of gradients are combined."""
        on = self.scale_device or next((param.device for param in params if param.grad is not None), None)
        return on or (params[0].device if params else torch.device("cpu"))

    def require_scale(self, call: str, target: Any = ()) -> None:
        """Raise AssertionError if no loss has been scaled.

        Lightning and Accelerate scale all losses themselves, and in their loops the first batches may not
        produce a loss. If no loss has been scaled and no parameter has a gradient, initialize the loss scale
        there instead of raising an error.

        Args:
            call: The name of the method that needs the loss scale.
            target: The optimizer or the parameters that the method was called with.
        """
        if self.used_scales():
            return
        params = params_of(target) if hasattr(target, "param_groups") else target
        if not self.scales_all or any(param.grad is not None for param in params):
            msg = f"Attempted {call} but _scale is None. Call {self.words.backward} earlier in the iteration."
            raise AssertionError(msg)
        self.default.materialize(self.device)

    def state_dict(self, skipped_steps: int) -> dict[str, Any]:
        """Return the state of a scaler, with torch's keys. A disabled scaler has none. This is a host sync.

        The key ``amp_plugin`` is added for numbers that torch's keys cannot express, such as the skip count,
        the hysteresis, the loss scales of named losses and the statistics of spikes.
        """
        spikes = self.spikes.state_dict()
        if not self.enabled:
            return {OUR_KEY: spikes} if spikes else {}
        states = {name: scale.state_dict() for name, scale in self.scales.items()}
        saved = states.pop(None)
        tracker = saved.pop(HYSTERESIS)
        if not (skipped_steps or states or spikes or self.options.hysteresis > 1):
            return saved
        ours = {HYSTERESIS: tracker, "skipped_steps": skipped_steps, "losses": states, **spikes}
        return {**saved, OUR_KEY: ours}

    def load_spikes(self, saved: dict[str, Any]) -> None:
        """Load the statistics of spikes, if the state has them."""
        self.spikes.load_state_dict(saved.get(OUR_KEY, {}))

    def load_state_dict(self, saved: dict[str, Any]) -> int:
        """Load a state of this class or of torch's scaler, and return its number of skipped steps."""
        ours = saved.get(OUR_KEY, {})
        self.load_spikes(saved)
        self.default.load_state_dict({**saved, **ours})
        for name, state in ours.get("losses", {}).items():
            if name in self.scales:
                self.scales[name].load_state_dict(state)
        return int(ours.get("skipped_steps", 0))
