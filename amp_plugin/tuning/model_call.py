"""Find the call in which a program's model computes logits, and repeat it with other token ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from amp_plugin.patches import replaced

_TOKENS: Final = ("input_ids", "tokens", "idx", "x")  # arguments with these names are examined first
# In transformers, these arguments limit the computation to the last logits.
_KEPT: Final = ("logits_to_keep", "num_logits_to_keep")


def logits_of(output: Any, tokens: Tensor, *, are_all: bool = True) -> Tensor | None:
    """Return the logits in the output of a model, or None if there are none.

    The output may be a tensor, an object, a mapping or a tuple.

    Args:
        output: The output of a model.
        tokens: The token ids that the model was given, of shape (number of sequences, length of the longest
            sequence).
        are_all: True if the output must have logits for every token. If False, the output may have logits for
            only some tokens of each sequence.
    """
    found = output
    if not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("logits")
        if found is None and isinstance(output, (tuple, list)) and output:
            found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3 or not found.is_floating_point():
        return None
    dims = 2 if are_all else 1
    return found if found.shape[:dims] == tokens.shape[:dims] else None


Step = Callable[[Tensor], Any]
"""A function that calls a model with other token ids and returns its output.

The token ids are an int64 tensor of shape (number of sequences, length of the longest sequence).
"""


def _step_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place_of_tokens: int | str,
    autocast: tuple[bool, torch.dtype],
) -> Step:
    """Return a function that repeats a model call with other token ids, under the same autocast setting.

    ``autocast`` says whether autocast was enabled at the call, and with which dtype.

    Other tensor arguments, such as masks and labels, are replaced by None, because they belong to the old
    token ids. An argument that limits the number of computed logits is left out.
    """
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    device = given[place_of_tokens].device

    def step(tokens: Tensor) -> Any:
        def argument(place: int | str) -> Any:
            if place == place_of_tokens:
                return tokens.to(device)
            return None if isinstance(given[place], Tensor) else given[place]

        is_on, dtype = autocast
        with torch.autocast(device.type, dtype=dtype, enabled=is_on):
            return model(
                *map(argument, range(len(args))), **{n: argument(n) for n in kwargs if n not in _KEPT}
            )

    return step


@contextmanager
def model_calls(on_call: Callable[[nn.Module, Step], object]) -> Iterator[None]:
    """Call ``on_call`` after the first model call that computes logits, then end the program.

    ``on_call`` gets the model, and a function that repeats the call with other token ids.

    If nested modules return logits, the outermost one is used. Calls with gradients disabled, such as calls
    for sampling, are ignored.
    """
    plain = nn.Module.__call__
    inside: list[nn.Module] = []
    found: list[tuple[int, nn.Module, Step]] = []

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place = _place_of_tokens(args, kwargs) if torch.is_grad_enabled() else None
        tokens = None if place is None else kwargs[place] if isinstance(place, str) else args[place]
        block = (False, torch.float32) if tokens is None else _autocast(tokens.device.type)
        inside.append(module)
        try:
            output = plain(module, *args, **kwargs)
        finally:
            inside.pop()
        are_all = not any(kwargs.get(name) for name in _KEPT)
        is_found = tokens is not None and logits_of(output, tokens, are_all=are_all) is not None
        if is_found and tokens is not None and place is not None:
            found.append((len(inside), module, _step_of(module, args, kwargs, place, block)))
        if found and not inside:
            _, model, step = min(found, key=lambda entry: entry[0])
            on_call(model, step)
            sys.exit()  # end the program as if it had called sys.exit() itself
        return output

    with replaced(nn.Module, "__call__", called):
        yield


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _place_of_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the position or name of the first argument that is a 2-dim tensor of integers, or None."""
    names: list[int | str] = [*(name for name in _TOKENS if name in kwargs), *range(len(args)), *kwargs]
    for place in names:
        value = kwargs[place] if isinstance(place, str) else args[place]
        is_whole = isinstance(value, Tensor) and value.dtype in {torch.int64, torch.int32}
        if is_whole and value.dim() == 2:
            return place
    return None
