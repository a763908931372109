"""install(): make every Accelerator of the process one of ours, whoever creates it."""

from __future__ import annotations

import functools
import multiprocessing
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
        return _of_class_for, (kind,), self.__getstate__()

    return __reduce__


def _of_class_for(kind: type[Accelerator]) -> AmpAccelerator:
    cls = _class_for(kind)
    return cls.__new__(cls)


def _with_options(kwargs: dict[str, Any], options: AmpKwargs | None) -> dict[str, Any]:
    handlers = list(kwargs.get("kwargs_handlers") or ())
    if options is None or any(isinstance(given, AmpKwargs) for given in handlers):
        return kwargs
    return {**kwargs, "kwargs_handlers": [*handlers, options]}
