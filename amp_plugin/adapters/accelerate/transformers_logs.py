"""transformers.Trainer logs the loss scale and the skipped steps where it logs the loss."""

from __future__ import annotations

import functools
import sys
from typing import Any

_OURS = "_shows_amp_plugin"


def log_in_transformers() -> None:
    """Let ``transformers.Trainer.log`` add what an AmpAccelerator tells of steps; once, if it is imported.

    transformers hands its own callbacks, TensorBoard's and the others, what ``Trainer.log`` is given, and
    never calls ``Accelerator.log``. A Trainer with another accelerator logs as before.
    """
    module = sys.modules.get("transformers.trainer")
    trainer: Any = getattr(module, "Trainer", None)
    if trainer is None or hasattr(trainer.log, _OURS):
        return
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        metrics = getattr(getattr(self, "accelerator", None), "metrics_since_log", None)
        if metrics is not None and "loss" in logs:
            logs = {**logs, **{name: value for name, value in metrics().items() if name not in logs}}
        return log(self, logs, *args, **kwargs)

    setattr(log_with_metrics, _OURS, True)
    trainer.log = log_with_metrics
