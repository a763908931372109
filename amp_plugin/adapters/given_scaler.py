"""A scaler that a user gives an adapter in place of the adapter's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from amp_plugin.scaling.grad_scaler import GradScaler

PUBLIC_METHODS: Final = tuple(
    name for name in dir(GradScaler) if not name.startswith("_") and callable(getattr(GradScaler, name))
)


def scaler_for(given: Any, name: str, make: Callable[[bool], GradScaler]) -> Any:
    """Return the scaler that an adapter calls once it was given another.

    Args:
        given: None scales no loss. A scaler of ours, or an object that has all of its public methods, such
            as a wrapper around one, is called as it is. Torch's gives a scaler of ours its options and
            state, and is not called.
        name: The attribute that it was assigned to, for the error.
        make: Makes a scaler with the adapter's options; its argument is whether that scaler is enabled.

    Raises:
        TypeError: It is something else, such as a subclass of torch's scaler with methods of its own.
    """
    if given is None:
        return make(False)
    if isinstance(given, torch.amp.GradScaler) and type(given).__module__.startswith("torch."):
        scaler = make(given.is_enabled())
        if given.is_enabled():
            scaler.load_state_dict(given.state_dict())
        return scaler
    missing = [method for method in PUBLIC_METHODS if not callable(getattr(given, method, None))]
    if missing:
        msg = (
            f"{name} = {given!r}: this object cannot stand in for an amp_plugin.GradScaler, it has no "
            f"{', '.join(missing[:3])}...; give an amp_plugin.GradScaler, an object that has all of its "
            "methods, a torch.amp.GradScaler (ours takes its options and state), or None to scale no loss"
        )
        raise TypeError(msg)
    return given
