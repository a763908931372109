"""Which code of a Trainer's user sees gradients between a backward pass and the end of its step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any


class UserHooks:
    """The hooks that a module and its callbacks override; each is looked up once.

    Args:
        model: the LightningModule.
        is_overridden: whether a user has written a hook of a module or a callback.
    """

    def __init__(self, model: Any, is_overridden: Callable[[str, Any], bool]) -> None:
        self._model = model
        self._is_overridden = is_overridden

    @cached_property
    def read_gradients(self) -> bool:
        """Whether a hook may read gradients before the step or after it, so that they must be unscaled."""
        return self._is_overridden("configure_gradient_clipping", self._model) or any(
            self._is_overridden(hook, owner)
            for owner in (self._model, *self._model.trainer.callbacks)
            for hook in ("on_before_optimizer_step", "on_before_zero_grad")
        )

    @cached_property
    def clip(self) -> bool:
        """Whether a method of the user clips."""
        methods = ("configure_gradient_clipping", "clip_gradients")
        return any(self._is_overridden(method, self._model) for method in methods)

    @cached_property
    def keep_gradients(self) -> bool:
        """Whether gradients may outlive the step."""
        return self._is_overridden("optimizer_zero_grad", self._model)
