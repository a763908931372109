"""Say once that weights in 16 bits, frozen when the model was set up, are trained now."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.conversion import HALVES

_ATTRIBUTE = "_amp_plugin_tells_of_thawed"


def tell_of_thawed(optimizer: Optimizer) -> None:
    """Let an optimizer warn, once, when it steps weights in 16 bits; any number of calls.

    Args:
        optimizer: torch's, of a model whose trainable weights are float32 and some frozen ones are not.
    """
    if not hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, False)  # not told yet
        optimizer.register_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, _ATTRIBUTE, True):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    count = sum(param.dtype in HALVES and param.grad is not None for param in params)
    if count:
        setattr(optimizer, _ATTRIBUTE, True)
        warn_user(
            f"{count} parameters in 16 bits were frozen, or not made yet, when the model was set up, so that "
            f"they did not become float32, and {type(optimizer).__name__} steps them now: updates below "
            "1/256 of a weight (1/2048 in float16) are lost. Unfreeze or make them before the model is set "
            "up, or store them with weights='bf16' (with weights='fp16' in float16), which stores a weight "
            "when it is unfrozen"
        )


_after_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass
