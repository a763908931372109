"""Replaces torch's GradScalers with amp_plugin's while a program runs under ``amp-plugin run``.

During the run, ``torch.amp.GradScaler`` and its aliases refer to a subclass of ``amp_plugin.GradScaler`` with
torch's class name and signature. Therefore ``type(scaler) is torch.amp.GradScaler`` holds, and subclasses in
the program derive from amp_plugin's scaler. If the program assigns a method to ``torch.amp.GradScaler``, the
replacement scalers use this method. If the program subclassed torch's own class before the run began,
instances of the subclass are replaced when they are created.

A scaler that replaces torch's is pickled as an instance of torch's class, with its state in torch's format.
Therefore a file written under ``amp-plugin run`` can be loaded without amp_plugin. If the file is loaded
under ``amp-plugin run``, the scaler becomes an ``amp_plugin.GradScaler`` again.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from amp_plugin.patches import class_between, replaced, standing_in
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.shared import OUR_KEY

_TORCHS: Final[Any] = next(kind for kind in GradScaler.__mro__ if kind.__module__.startswith("torch."))
_PRIVATE: Final = {name for name in vars(_TORCHS) if name.startswith("_") and not name.startswith("__")}
# The modules that export a scaler class. The first module in each row defines the class.
_MODULES: Final = (
    ("torch.amp.grad_scaler", "torch.amp", "torch"),
    ("torch.cuda.amp.grad_scaler", "torch.cuda.amp"),
    ("torch.cpu.amp.grad_scaler", "torch.cpu.amp"),
)
# Maps attributes of torch's GradScaler to the constructor options whose values they hold.
_OPTIONS: Final = {
    "_init_scale": "init_scale",
    "_growth_factor": "growth_factor",
    "_backoff_factor": "backoff_factor",
    "_growth_interval": "growth_interval",
}

_TORCHS_NAMES: Final = {
    *(*_OPTIONS, "_device", "_enabled", "_init_growth_tracker"),
    *("_scale", "_growth_tracker", "_per_optimizer_states"),
}
_Start = Callable[[Any, Sequence[Any], dict[str, Any]], None]
"""A function that initializes a scaler with the arguments of a torch scaler."""


def overrides_private(kind: type) -> bool:
    """Return whether a subclass of torch's scaler overrides any of the scaler's private methods."""
    return any(getattr(kind, name) is not getattr(_TORCHS, name) for name in _PRIVATE)


@contextmanager
def scalers_taken(
    may_take: Callable[[type], bool],
    arguments: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]],
    made: Callable[[Any], object],
) -> Iterator[None]:
    """Replace each torch scaler that a program creates or loads with an ``amp_plugin.GradScaler``.

    ``may_take`` returns whether scalers of a class may be replaced. ``arguments`` returns the arguments for
    the new scaler. ``made`` is called with each new scaler.
    """
    set_state, reduce = _TORCHS.__setstate__, GradScaler.__reduce_ex__

    def start(scaler: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        GradScaler.__init__(scaler, *args, **arguments(args, kwargs))
        made(scaler)

    @functools.wraps(set_state)
    def restore(scaler: Any, state: Mapping[str, Any]) -> None:
        kind: Any = type(scaler)
        if issubclass(kind, GradScaler) or not may_take(kind):
            set_state(scaler, state)
            return
        scaler.__class__ = class_between(GradScaler, kind)
        _load(scaler, state, start)

    def reduce_as_torchs(scaler: Any, protocol: Any) -> Any:
        kind = type(scaler)
        if stand_in not in kind.__mro__:
            kind = vars(kind).get("_stands_for")
        if kind is None:  # the scaler does not replace a torch scaler
            return reduce(scaler, protocol)
        GradScaler.__getstate__(scaler)  # raises in the middle of an iteration
        made_empty = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        return *made_empty, _state_of_torchs(scaler)

    stand_in = _stand_in(start)
    with ExitStack() as undo:
        undo.enter_context(
            standing_in(GradScaler, _TORCHS, may_take=may_take, arguments=arguments, made=made)
        )
        undo.enter_context(replaced(_TORCHS, "__setstate__", restore))
        undo.enter_context(replaced(GradScaler, "__reduce_ex__", reduce_as_torchs))
        for first, *others in _MODULES:
            theirs = importlib.import_module(first).GradScaler
            ours = stand_in if theirs is _TORCHS else _made(theirs, (theirs, stand_in), {})
            for module in (first, *others):
                undo.enter_context(replaced(importlib.import_module(module), "GradScaler", ours))
        yield


def _load(scaler: Any, state: Mapping[str, Any], start: _Start) -> None:
    """Initialize an empty ``amp_plugin.GradScaler`` from the state of a pickled torch scaler."""
    options = {option: state[name] for name, option in _OPTIONS.items() if name in state}
    start(scaler, (), {**options, "device": state["_device"], "enabled": state["_enabled"]})
    if scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": state["_init_growth_tracker"]})
    vars(scaler).update({name: value for name, value in state.items() if name not in _TORCHS_NAMES})


def _stand_in(start: _Start) -> type:
    """Return the class that replaces ``torch.amp.GradScaler`` during the run.

    For the class, ``isinstance`` and ``issubclass`` return the same as for ``torch.amp.GradScaler`` itself.
    """

    @functools.wraps(_TORCHS.__init__)
    def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        # Subclasses that are not replaced also call ``init``, through ``super().__init__()``.
        if not isinstance(scaler, GradScaler):
            _TORCHS.__init__(scaler, *args, **kwargs)
            return
        start(scaler, args, kwargs)

    def set_state(scaler: Any, state: dict[str, Any]) -> None:
        if not isinstance(scaler, GradScaler):
            _TORCHS.__setstate__(scaler, state)
        elif "_enabled" in state:  # torch's attribute
            _load(scaler, state, start)
        else:
            GradScaler.__setstate__(scaler, state)

    named = {
        "__init__": init,
        "__setstate__": set_state,
        "state_dict": _state_dict,
        "__init_subclass__": classmethod(_init_subclass),
        "__subclasshook__": classmethod(_is_superclass_of),
    }
    return _made(_TORCHS, (GradScaler,), named)


def _init_subclass(kind: Any, /, **options: Any) -> None:
    """Derive a new subclass from torch's own class if it overrides private methods of torch's scaler.

    ``kind`` is the new class. Python calls this function for each subclass that the program defines.
    """
    super(GradScaler, kind).__init_subclass__(**options)
    mixins = (base for base in kind.__mro__ if not issubclass(base, _TORCHS))
    if any(_PRIVATE & vars(owner).keys() for owner in (kind, *mixins)):
        kind.__bases__ = tuple(vars(base).get("_stands_for", base) for base in kind.__bases__)


def _is_superclass_of(kind: type, other: type, /) -> bool:
    """Return whether ``other`` derives from the torch class that ``kind`` replaces.

    ``isinstance`` and ``issubclass`` call this function. A program's subclass of a stand-in class replaces no
    torch class. If ``kind`` is such a subclass, the result is NotImplemented, and Python's usual rules apply.
    """
    theirs = vars(kind).get("_stands_for")
    return NotImplemented if theirs is None else issubclass(other, theirs)


def _state_dict(scaler: Any) -> dict[str, Any]:
    """Return the scaler's state with torch's keys.

    amp_plugin's own key is added if there is more to save than torch's values and the skip count.
    """
    if not isinstance(scaler, GradScaler):
        return _TORCHS.state_dict(scaler)  # type: ignore[no-any-return]
    state = GradScaler.state_dict(scaler)
    without_skips = scaler.core.shared.state_dict(0)
    return state if OUR_KEY in without_skips else without_skips


def _made(theirs: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Return a class that stands in for a torch class and has its name.

    The metaclass is ABCMeta, so that a program's subclass may also be abstract.
    """
    named = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    everything = {**named, "_stands_for": theirs, **namespace}
    return ABCMeta(theirs.__name__, bases, everything)


def _state_of_torchs(scaler: Any) -> dict[str, Any]:
    """Return the attributes of a torch scaler with the same state, plus those that the program has set."""
    device = scaler.core.shared.device
    state: dict[str, Any] = {"_device": device, "_enabled": scaler.is_enabled()}
    if scaler.is_enabled():
        state |= {
            "_init_scale": scaler.get_scale(),
            "_growth_factor": scaler.get_growth_factor(),
            "_backoff_factor": scaler.get_backoff_factor(),
            "_growth_interval": scaler.get_growth_interval(),
            "_init_growth_tracker": scaler.state_dict()["_growth_tracker"],
            "_scale": None,
            "_growth_tracker": None,
            "_per_optimizer_states": defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state),
        }
    ours = vars(GradScaler("cpu", enabled=False)).keys() | _TORCHS_NAMES
    return {**{name: value for name, value in vars(scaler).items() if name not in ours}, **state}
