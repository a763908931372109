"""A scaler's state: torch's five keys, which torch.amp, Lightning and Accelerate read, and ours."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch.amp.grad_scaler import OptState
from typing_extensions import Self

from amp_plugin.scaling import updating
from amp_plugin.scaling.distributed import Groups
from amp_plugin.scaling.loss_scale import DynamicLossScale, LossScale
from amp_plugin.scaling.optimizer_calls import OptimizerCalls

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OUR_KEY = "amp_plugin"


class ScalerState(OptimizerCalls):
    """Saving, loading, pickling and copying of a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers: a host sync.

        Applies a requested update first. torch.amp's scaler loads it too.

        Returns:
            ``{}`` if disabled; else ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``,
            ``_growth_tracker`` as torch's, and ``amp_plugin`` with ``hysteresis_tracker``,
            ``skipped_steps`` and the states of named ``losses``.
        """
        if not self._enabled:
            return {}
        self.end_iteration()
        ours = {
            "hysteresis_tracker": self._loss_scale.tolerance(),
            "skipped_steps": self.skipped_steps(),
            "losses": {
                name: {**_numbers(one), "hysteresis_tracker": one.tolerance()}
                for name, one in self._loss_scales.items()
            },
        }
        return {**_numbers(self._loss_scale), _OUR_KEY: ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, ours or torch.amp's.

        An empty or foreign state leaves the scaler as it is, with a warning. Gradients that wait for a
        step are converted to the loaded scale.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            RuntimeError: A scaled float16 gradient waits for a step.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, dict) or "scale" not in state_dict:
            warnings.warn(_foreign_text(state_dict), UserWarning, stacklevel=2)
            return
        updating.refuse_fp16(self, "load_state_dict()")
        self._requested = False
        before = [(one, one.snapshot()) for one in self._all_loss_scales() if one.value is not None]
        ours = state_dict.get(_OUR_KEY, {})
        _restore(self._loss_scale, state_dict, ours.get("hysteresis_tracker"))
        self._skipped_before = int(ours.get("skipped_steps", 0))
        self._skipped = None
        saved = ours.get("losses", {})
        for name, one in self._loss_scales.items():
            if name in saved:
                _restore(one, saved[name], saved[name].get("hysteresis_tracker"))
        for one, old in before:
            updating.convert(self, one, old)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy between iterations: the same process groups, optimizers and gradients stay behind."""
        twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._between_iterations(), memo))
        twin._groups = self._groups
        return twin

    def __copy__(self) -> Self:
        """As deepcopy: a scale cannot be shared."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle between iterations: optimizers and gradients stay behind."""
        if self._groups:
            msg = (
                "a GradScaler with process_groups or sharded_groups cannot be pickled, they belong to this "
                "process: save its state_dict() and load it into a scaler made with the new groups."
            )
            raise RuntimeError(msg)
        return self._between_iterations()

    def _between_iterations(self) -> dict[str, Any]:
        for record in self._registry:
            busy = any(one.pending(record.slot) for one in record.sets)
            if self._enabled and (busy or record.stage is not OptState.READY):
                msg = (
                    "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
                    "end after scaler.update(): the units of gradients that wait for a step cannot be saved."
                )
                raise RuntimeError(msg)
        state = dict(self.__dict__)
        state["_skipped_before"] = self.skipped_steps() if self._enabled else 0
        for name in (
            "_registry",
            "_requested",
            "_floor",
            "_last_backward",
            "_backward",
            "_open_results",
            "_passed",
            "_norms",
            "_groups",
            "_skipped",
        ):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with the pickled numbers and no optimizers and no process groups."""
        self.__dict__.update(state)
        self._groups = Groups()
        self._start()

    def _start(self) -> None:
        raise NotImplementedError

    def end_iteration(self) -> None:
        """Apply a requested update."""
        raise NotImplementedError


def _numbers(one: LossScale) -> dict[str, Any]:
    """A loss scale's numbers under torch's names; a constant one has torch's default rule."""
    dynamic = one if isinstance(one, DynamicLossScale) else DynamicLossScale()
    return {
        "scale": one.item(),
        "growth_factor": dynamic.growth_factor,
        "backoff_factor": dynamic.backoff_factor,
        "growth_interval": dynamic.growth_interval,
        "_growth_tracker": one.tracker(),
    }


def _restore(one: LossScale, saved: dict[str, Any], hysteresis_tracker: int | None) -> None:
    one.restore(saved["scale"], saved.get("_growth_tracker", 0), hysteresis_tracker)
    if isinstance(one, DynamicLossScale):
        one.growth_factor = float(saved.get("growth_factor", one.growth_factor))
        one.backoff_factor = float(saved.get("backoff_factor", one.backoff_factor))
        one.growth_interval = int(saved.get("growth_interval", one.growth_interval))


def _foreign_text(state: Any) -> str:
    if not state:
        return (
            "The source state dict is empty, possibly because it was saved from a disabled instance of "
            "GradScaler; the scaler keeps its present scale."
        )
    keys = ", ".join(map(repr, state)) if isinstance(state, dict) else type(state).__name__
    return (
        f"the scaler state holds {keys}, which is not a GradScaler's ({', '.join(_TORCH_KEYS)}); "
        "the scaler keeps its present scale. Set one with update(new_scale)."
    )
