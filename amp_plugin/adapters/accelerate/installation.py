"""install(): make every Accelerator of the process one of ours, whoever creates it."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from amp_plugin.adapters.accelerate.accelerator import AmpAccelerator
from amp_plugin.adapters.accelerate.settings import AmpKwargs
from amp_plugin.casting.dispatcher import set_default_rules

_IN_CHILDREN = "amp_plugin.adapters.accelerate"
_originals: list[Callable[..., None]] = []
_classes: dict[type, type] = {AmpAccelerator: AmpAccelerator, Accelerator: AmpAccelerator}


def install(options: AmpKwargs | None = None) -> None:
    """Turn each ``accelerate.Accelerator`` made from now on into an AmpAccelerator.

    For code that makes its own, such as ``transformers.Trainer``; subclasses of Accelerator keep
    their methods. Accelerators that exist stay as they are. Child processes of ``multiprocessing`` have it
    too, however they are started. May be repeated; the last options hold.

    Args:
        options: used where the Accelerator's own ``kwargs_handlers`` have no AmpKwargs.

    Example:
        >>> import accelerate
        >>> install(AmpKwargs(init_scale=1024.0))
        >>> accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
        >>> isinstance(accelerator, AmpAccelerator), accelerator.scaler.get_scale()
        (True, 1024.0)
        >>> uninstall()
    """
    if _originals:
        uninstall()
    original = Accelerator.__init__
    _originals.append(original)

    @functools.wraps(original)
    def init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        _set_weights_up_before_transformers_loads()
        if isinstance(self, AmpAccelerator):
            original(self, *args, **kwargs)
            return
        self.__class__ = _class_for(type(self))
        AmpAccelerator.__init__(self, *args, **_with_options(kwargs, options))

    Accelerator.__init__ = init
    multiprocessing.current_process()._config[_IN_CHILDREN] = _InstalledInChildren(options)  # type: ignore[attr-defined]


def uninstall() -> None:
    """Let ``accelerate.Accelerator`` make Accelerate's own again; those that exist keep running."""
    if _originals:
        Accelerator.__init__ = _originals.pop()
        multiprocessing.current_process()._config.pop(_IN_CHILDREN, None)  # type: ignore[attr-defined]
        set_default_rules(None)


class _InstalledInChildren:
    """Installs where it is unpickled: in a child that spawn or forkserver has started.

    Such a child imports Accelerate anew. What stands in a process's configuration is handed to its
    children: copied by fork, pickled by the others.
    """

    def __init__(self, options: AmpKwargs | None) -> None:
        self.options = options

    @classmethod
    def here(cls, options: AmpKwargs | None) -> _InstalledInChildren:
        """Install in this process, and tell its own children to."""
        install(options)
        return cls(options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).here, (self.options,)


def _class_for(kind: type[Accelerator]) -> type[AmpAccelerator]:
    """Return the class that puts our methods between a subclass's and Accelerator's."""
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__reduce__": _pickled_as(kind)}
        _classes[kind] = type(kind.__name__, (kind, AmpAccelerator), names)
    return _classes[kind]


def _pickled_as(kind: type[Accelerator]) -> Callable[[AmpAccelerator], tuple[Any, ...]]:
    """Return a ``__reduce__``: a class made here is found by no name, that of the program is."""

    def __reduce__(self: AmpAccelerator) -> tuple[Any, ...]:  # noqa: N807 -- the class made here has it
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)  # Python 3.10 has none
        return _of_class_for, (kind,), state

    return __reduce__


def _of_class_for(kind: type[Accelerator]) -> AmpAccelerator:
    cls = _class_for(kind)
    return cls.__new__(cls)


def _with_options(kwargs: dict[str, Any], options: AmpKwargs | None) -> dict[str, Any]:
    handlers = list(kwargs.get("kwargs_handlers") or ())
    if options is None or any(isinstance(given, AmpKwargs) for given in handlers):
        return kwargs
    return {**kwargs, "kwargs_handlers": [*handlers, options]}


def _set_weights_up_before_transformers_loads() -> None:
    """Let ``transformers.Trainer`` set weights up before it loads a checkpoint; once, if it is imported.

    It loads before it prepares, which rounds to the 16 bits of a model that came in them, and calls nothing
    of the accelerator and no callback before. A Trainer with another accelerator loads as before.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(trainer._load_from_checkpoint, "sets_up_weights"):
        return
    load = trainer._load_from_checkpoint

    @functools.wraps(load)
    def load_exactly(self: Any, checkpoint: str, model: Any = None) -> Any:
        set_up = getattr(self.accelerator, "set_up_weights", None)
        if set_up is not None:
            set_up(self.model if model is None else model)
        return load(self, checkpoint, model)

    load_exactly.sets_up_weights = True  # type: ignore[attr-defined]
    trainer._load_from_checkpoint = load_exactly
