"""Which code of a Trainer's user sees gradients between a backward pass and the end of its step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

_METHODS_OF_MODULES: Final = ("configure_gradient_clipping", "optimizer_step")
_CLIPPING_OF_PLUGINS: Final = (
    "_after_closure",
    "_clip_gradients",
    "clip_gradients",
    "clip_grad_by_norm",
    "clip_grad_by_value",
    "main_params",
)


class UserHooks:
    """The hooks that a module, its callbacks and a subclass of the plugin override; each is looked up once.

    Args:
        model: the LightningModule.
        is_overridden: whether a user has written a hook of a module or a callback.
        is_extended: whether a user has written a method of the plugin.
        manual: whether the module steps optimizers itself.
    """

    def __init__(
        self,
        model: Any,
        is_overridden: Callable[[str, Any], bool],
        is_extended: Callable[[str], bool],
        *,
        manual: bool,
    ) -> None:
        self._model = model
        self._is_overridden = is_overridden
        self._is_extended = is_extended
        self._manual = manual

    @cached_property
    def read_gradients(self) -> bool:
        """Whether a hook may read gradients before the step, so that they must be unscaled."""
        return (
            any(map(self._is_extended, ("optimizer_step", *_CLIPPING_OF_PLUGINS)))
            or any(self._is_overridden(method, self._model) for method in _METHODS_OF_MODULES)
            or any(
                self._is_overridden("on_before_optimizer_step", owner)
                for owner in (self._model, *self._model.trainer.callbacks)
            )
        )

    @cached_property
    def clip(self) -> bool:
        """Whether a method of the user clips."""
        methods = ("configure_gradient_clipping", "clip_gradients")
        return any(map(self._is_extended, _CLIPPING_OF_PLUGINS)) or any(
            self._is_overridden(method, self._model) for method in methods
        )

    @property
    def clip_is_last(self) -> bool:
        """Whether the step follows on Lightning's own clipping, without code of the user in between."""
        return self._clips and not (self._manual or self.clip)

    @property
    def clip_is_unseen(self) -> bool:
        """Whether no code of the user can tell a clip in the gradients from one that the step works in."""
        return self.clip_is_last and not self.read_gradients

    @property
    def norm_is_lost(self) -> bool:
        """Whether the norm of unscaled gradients is taken only once they may have been changed."""
        by_value = self._clips and self._model.trainer.gradient_clip_algorithm == "value"
        return not self._manual and (by_value or self.read_gradients)

    @property
    def _clips(self) -> bool:
        return (self._model.trainer.gradient_clip_val or 0) > 0


def is_extended(plugin: Any, known: tuple[type, ...], method: str) -> bool:
    """Say whether a subclass of a plugin, or its user for this object, has a method of its own.

    Args:
        plugin: the plugin.
        known: the classes whose methods are not the user's.
        method: its name.
    """
    found = getattr(type(plugin), method)
    return method in vars(plugin) or all(found is not getattr(kind, method, None) for kind in known)
