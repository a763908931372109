"""The loss scales of a scaler: the default one, and one for each named loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amp_plugin.scaling.loss_scale import LossScale, LossScaleOptions


class LossScales:
    """The scales that losses are multiplied by.

    Args:
        options: Of each of them.
        names: The losses that have a scale of their own.

    Attributes:
        default: The scale of losses without a name.
        named: The scales of the others.
        updates_requested: How often ``update()`` was called: what torch forgets then, begins anew.

    Raises:
        ValueError: ``names`` is one string, or holds a name twice.
    """

    def __init__(self, options: LossScaleOptions, names: Sequence[str] = ()) -> None:
        if isinstance(names, str) or len(set(names)) < len(names):
            msg = (
                f"losses={names!r} is not allowed; give a list of different names, such as ['pixel', 'edges']"
            )
            raise ValueError(msg)
        self.default = LossScale(options)
        self.named = {name: LossScale(options) for name in names}
        self.updates_requested = 0

    def of(self, name: str | None) -> LossScale:
        """Return the scale of a loss; None is the default.

        Raises:
            ValueError: ``name`` is unknown.
        """
        if name is None:
            return self.default
        if name not in self.named:
            known = ", ".join(self.named) or "none"
            msg = f"loss {name!r} is not known; the constructor's losses= named: {known}"
            raise ValueError(msg)
        return self.named[name]

    def all(self) -> list[LossScale]:
        """Return all scales, the default first."""
        return [self.default, *self.named.values()]

    def materialized(self) -> list[LossScale]:
        """Return those that have been used."""
        return [loss_scale for loss_scale in self.all() if loss_scale.value is not None]

    @property
    def device(self) -> torch.device:
        """Where the scales are; one must have been used."""
        value = self.default.value
        return value.device if value is not None else self.require("scale").require().device

    def require(self, call: str) -> LossScale:
        """Return the first scale that has been used.

        Args:
            call: Which call needs it, for the error.

        Raises:
            RuntimeError: None has.
        """
        if self.default.value is not None:
            return self.default
        used = self.materialized()
        if not used:
            msg = (
                f"Attempted {call} but _scale is None. Call scaler.scale(loss).backward() "
                "earlier in the iteration."
            )
            raise RuntimeError(msg)
        return used[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the named scales: a host sync."""
        return {
            name: {**loss_scale.state_dict(), "hysteresis_tracker": loss_scale.tolerance()}
            for name, loss_scale in self.named.items()
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over the states of those named scales that it holds."""
        for name, loss_scale in self.named.items():
            if name in saved:
                loss_scale.load_state_dict(saved[name], saved[name].get("hysteresis_tracker"))
