"""Defines ``install()``, which makes each new Accelerator in the process an AmpAccelerator."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from amp_plugin.adapters.accelerate.accelerator import AmpAccelerator
from amp_plugin.adapters.accelerate.settings import AmpKwargs
from amp_plugin.adapters.session import Session
from amp_plugin.messages import warn_user
from amp_plugin.patches import standing_in

_installed = ExitStack()


def install(options: AmpKwargs | None = None, *, made: Callable[[AmpAccelerator], object] = id) -> None:
    """Make each new ``accelerate.Accelerator`` an AmpAccelerator.

    Use ``install()`` for code that makes its own Accelerator, such as ``transformers.Trainer``. Subclasses of
    Accelerator keep their methods. Existing Accelerators do not change, and a warning names their class. Call
    ``install()`` at the top level of the main module, because spawned child processes import that module
    again. If ``install()`` is called several times, the last options apply.

    Args:
        options: the options for every Accelerator whose ``kwargs_handlers`` contain no AmpKwargs.
        made: a function that is called with each new Accelerator.

    Example:
        >>> import accelerate
        >>> install(AmpKwargs(init_scale=1024.0))
        >>> accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
        >>> isinstance(accelerator, AmpAccelerator), accelerator.scaler.get_scale()
        (True, 1024.0)
        >>> uninstall()
    """
    uninstall()
    _warn_of_earlier_ones()

    def arguments(_args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        _set_weights_up_before_transformers_loads()
        handlers = given.get("kwargs_handlers") or ()
        if options is None or any(isinstance(handler, AmpKwargs) for handler in handlers):
            return given
        return {**given, "kwargs_handlers": [*handlers, options]}

    _installed.enter_context(standing_in(AmpAccelerator, Accelerator, arguments=arguments, made=made))
    _installed.callback(Session.forget_rules)


def uninstall() -> None:
    """Undo ``install()``. Accelerators that exist keep working."""
    _installed.close()


def _warn_of_earlier_ones() -> None:
    """Warn about existing Accelerators, because they keep training without amp_plugin."""
    kinds = {type(instance) for instance in gc.get_objects()} if AcceleratorState._shared_state else set()
    for kind in kinds:
        if issubclass(kind, Accelerator) and not issubclass(kind, AmpAccelerator):
            warn_user(
                f"install() has no effect on the {kind.__name__} that was made before it, which computes "
                "without amp_plugin; call install() before the program makes an Accelerator, or run the "
                "program unedited: amp-plugin run train.py"
            )


def _set_weights_up_before_transformers_loads() -> None:
    """Make ``transformers.Trainer`` convert weights to their storage format before it loads a checkpoint.

    If the checkpoint were loaded into 16-bit weights first, its values would be rounded to 16 bits.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(trainer._load_from_checkpoint, "sets_up_weights"):
        return
    load = trainer._load_from_checkpoint

    @functools.wraps(load)
    def load_exactly(self: Any, checkpoint: str, model: Any = None) -> Any:
        if isinstance(self.accelerator, AmpAccelerator):
            self.accelerator.set_up_weights(self.model if model is None else model)
        return load(self, checkpoint, model)

    load_exactly.sets_up_weights = True  # type: ignore[attr-defined]
    trainer._load_from_checkpoint = load_exactly
