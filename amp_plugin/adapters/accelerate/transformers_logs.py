"""transformers.Trainer logs the loss scale and the skipped steps, and its steps can be run again."""

from __future__ import annotations

import functools
import sys
from typing import Any

_OURS = "_asks_amp_plugin"


def ask_in_transformers() -> None:
    """Let ``transformers.Trainer`` log what an AmpAccelerator tells of steps; once, if it is imported.

    transformers hands its own callbacks, TensorBoard's and the others, what ``Trainer.log`` is given, and
    never calls ``Accelerator.log``. ``Trainer.training_step`` is forward and backward, so it is run by
    ``recorded``. It loads a checkpoint before it prepares the model, which rounds a model that came in 16 bits:
    the weights are set up before. A Trainer with another accelerator does all three as before.
    """
    module = sys.modules.get("transformers.trainer")
    trainer: Any = getattr(module, "Trainer", None)
    if trainer is None or hasattr(trainer.log, _OURS):
        return
    log, training_step, load = trainer.log, trainer.training_step, trainer._load_from_checkpoint

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        metrics = getattr(getattr(self, "accelerator", None), "metrics_since_log", None)
        if metrics is not None and "loss" in logs:
            logs = {**logs, **{name: value for name, value in metrics().items() if name not in logs}}
        return log(self, logs, *args, **kwargs)

    @functools.wraps(training_step)
    def recorded_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = getattr(self.accelerator, "recorded", None)
        if recorded is None:
            return training_step(self, *args, **kwargs)
        return recorded(training_step, self, *args, **kwargs)

    @functools.wraps(load)
    def load_into_exact_weights(self: Any, checkpoint: str, model: Any = None) -> Any:
        set_up = getattr(getattr(self, "accelerator", None), "set_up_weights", None)
        if set_up is not None:
            set_up(self.model if model is None else model)
        return load(self, checkpoint, model)

    setattr(log_with_metrics, _OURS, True)
    trainer.log, trainer.training_step = log_with_metrics, recorded_step
    trainer._load_from_checkpoint = load_into_exact_weights
