"""The loss scales of a scaler: the default one, and one for each named loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amp_plugin.options import LossScaleOptions
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.user_warnings import warn_user

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OUR_KEY = "amp_plugin"


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

    def state_dict(self, skipped_steps: int) -> dict[str, Any]:
        """Return the state of a scaler, torch's keys and ours: a host sync."""
        ours = {
            "hysteresis_tracker": self.default.tolerance(),
            "skipped_steps": skipped_steps,
            "losses": {
                name: {**loss_scale.state_dict(), "hysteresis_tracker": loss_scale.tolerance()}
                for name, loss_scale in self.named.items()
            },
        }
        return {**self.default.state_dict(), _OUR_KEY: ours}

    def load_state_dict(self, saved: dict[str, Any]) -> int:
        """Take over what a state holds, ours or torch's, and return its count of skipped steps."""
        ours = saved.get(_OUR_KEY, {})
        self.default.load_state_dict(saved, ours.get("hysteresis_tracker"))
        for name, loss_scale in self.named.items():
            state = ours.get("losses", {}).get(name)
            if state is not None:
                loss_scale.load_state_dict(state, state.get("hysteresis_tracker"))
        return int(ours.get("skipped_steps", 0))


def is_state(given: Any) -> bool:
    """Whether something is the state of a scaler; warns if it is not.

    Raises:
        RuntimeError: It is empty: torch's scaler raises so too.
    """
    if isinstance(given, dict) and "scale" in given:
        return True
    if not given:
        msg = (
            "The source state dict is empty, possibly because it was saved from a disabled instance of "
            "GradScaler. Do not load it, and the scaler keeps its present scale."
        )
        raise RuntimeError(msg)
    keys = ", ".join(map(repr, given)) if isinstance(given, dict) else type(given).__name__
    warn_user(
        f"the scaler state holds {keys}, which is not a GradScaler's ({', '.join(_TORCH_KEYS)}); "
        "the scaler keeps its present scale. Set one with update(new_scale)."
    )
    return False
