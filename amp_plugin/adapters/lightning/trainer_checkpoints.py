"""Exchange checkpoints with the stock plugins, in both directions."""

from __future__ import annotations

from typing import Any

from amp_plugin.adapters.lightning.precision_core import PrecisionCore
from amp_plugin.user_warnings import warn_user

# Where the stock plugins keep the loss scale's state; the last is that of Lightning before 1.6.
STOCK_KEYS = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")


class TrainerCheckpoints(PrecisionCore):
    """Write the loss scale where the stock plugin would, and find it wherever one did."""

    checkpoint_key: str = "MixedPrecision"
    _fitting: bool = True
    _load_again: Any = None
    """The Trainer, if its model came in 16 bits: what it has loaded before set-up was rounded."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Move the state to the stock plugin's key; the checkpoint then has stock's keys only."""
        payload = checkpoint.pop(type(self).__qualname__, None)
        if payload:
            checkpoint[self.checkpoint_key] = payload

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the loss scale of a checkpoint, whichever plugin wrote it, to go on training."""
        if self._load_again is not None:
            load_weights_again(self._load_again, checkpoint)
            self._load_again = None
        found = next((checkpoint[key] for key in STOCK_KEYS if checkpoint.get(key)), None)
        if not self._fitting:
            return
        if self.settings.scales_loss and found is None:
            self.package.utilities.rank_zero_only(warn_user)(
                "the checkpoint holds no loss scale: it was written in another precision. Training goes on "
                f"in fp16 from init_scale={self.settings.loss_scale.init_scale:g}"
            )
        elif not self.settings.scales_loss and found is not None:
            self.package.utilities.rank_zero_only(warn_user)(
                "the checkpoint was written in fp16. Training goes on in "
                f"{self.settings.precision}, which needs no loss scale; the saved one is ignored"
            )
        if found is not None:
            self.load_state_dict(found)


def load_weights_again(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Load a checkpoint's weights and averages into a model that is float32 or stored by now."""
    module = trainer.lightning_module
    trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    for callback in trainer.callbacks:
        if any(kind.__name__ == "WeightAveraging" for kind in type(callback).__mro__):
            callback.on_load_checkpoint(trainer, module, checkpoint)
