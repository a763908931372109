"""Apply a function to every tensor of a structure of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


def scale_outputs(outputs: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs`` with every tensor replaced by ``apply(tensor)``.

    Args:
        outputs: A tensor; a list, tuple, named tuple or mapping, which keep their type; or another
            iterable, which becomes a lazy iterator, as in torch.
        apply: Called once for each tensor.

    Raises:
        ValueError: Something in it is neither a tensor nor a container.
    """
    if isinstance(outputs, Tensor):
        return apply(outputs)
    if isinstance(outputs, Mapping):
        return _rebuild_mapping(outputs, {key: scale_outputs(value, apply) for key, value in outputs.items()})
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(scale_outputs(value, apply) for value in outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(scale_outputs(value, apply) for value in outputs)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (scale_outputs(value, apply) for value in outputs)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}; pass the loss"
    raise ValueError(msg)


def _rebuild_mapping(like: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """A mapping of the same type; those whose constructor takes something else become a dict."""
    try:
        return type(like)(content)  # type: ignore[call-arg]
    except TypeError:
        return content
