"""Takes over the scalers of a program that is not edited. While it runs they are ours; in files, torch's.

A scaler that was taken over is pickled as torch's class with torch's state. Therefore a file written under
``amp-plugin run`` can be loaded without amp_plugin. When such a file is loaded under ``amp-plugin run``, the
scaler becomes ours again.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from amp_plugin.patches import class_between, replaced, standing_in
from amp_plugin.scaling.grad_scaler import GradScaler

_TORCHS: Final[Any] = torch.amp.GradScaler
_OPTIONS: Final = {  # torch's attribute -> the option that it holds
    "_init_scale": "init_scale",
    "_growth_factor": "growth_factor",
    "_backoff_factor": "backoff_factor",
    "_growth_interval": "growth_interval",
}

_TORCHS_NAMES: Final = {
    *(*_OPTIONS, "_device", "_enabled", "_init_growth_tracker"),
    *("_scale", "_growth_tracker", "_per_optimizer_states"),
}


@contextmanager
def scalers_taken(
    may_take: Callable[[type], bool],
    arguments: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]],
    made: Callable[[Any], object],
) -> Iterator[None]:
    """Make each of torch's scalers that a program makes or loads one of ours.

    ``may_take`` says whether a class is taken over. ``arguments`` returns the arguments for our scaler.
    ``made`` is called with each scaler.
    """
    taken: weakref.WeakSet[Any] = weakref.WeakSet()
    set_state, reduce = _TORCHS.__setstate__, GradScaler.__reduce_ex__

    def note(scaler: Any) -> None:
        taken.add(scaler)
        made(scaler)

    @functools.wraps(set_state)
    def restore(scaler: Any, state: Mapping[str, Any]) -> None:
        kind: Any = type(scaler)
        if issubclass(kind, GradScaler) or not may_take(kind):
            set_state(scaler, state)
            return
        scaler.__class__ = class_between(GradScaler, kind)
        options = {option: state[name] for name, option in _OPTIONS.items() if name in state}
        options |= {"device": state["_device"], "enabled": state["_enabled"]}
        GradScaler.__init__(scaler, **arguments((), options))
        if scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": state["_init_growth_tracker"]})
        vars(scaler).update({name: value for name, value in state.items() if name not in _TORCHS_NAMES})
        note(scaler)

    def reduce_as_torchs(scaler: Any, protocol: Any) -> Any:
        if scaler not in taken:
            return reduce(scaler, protocol)
        GradScaler.__getstate__(scaler)  # raises in the middle of an iteration
        kind = _TORCHS if type(scaler) is GradScaler else type(scaler).__bases__[0]
        made_empty = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        return *made_empty, _state_of_torchs(scaler)

    with (
        standing_in(GradScaler, _TORCHS, may_take=may_take, arguments=arguments, made=note),
        replaced(_TORCHS, "__setstate__", restore),
        replaced(GradScaler, "__reduce_ex__", reduce_as_torchs),
    ):
        yield


def _state_of_torchs(scaler: Any) -> dict[str, Any]:
    """Return the attributes of torch's scaler in this state, and the attributes that the program has set."""
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
