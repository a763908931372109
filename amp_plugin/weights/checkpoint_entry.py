"""What a state dict of an optimizer holds of the weights: what makes the model's 16 bits float32 again.

It stands beside ``state`` and ``param_groups``, which are as with float32 weights; torch's
``load_state_dict`` passes over it, so that a run without stored weights loads the state dict too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.stored_weight import StoredWeight

KEY: Final = "amp_plugin_weights"


def entry_of(form: str, weights: Mapping[int, StoredWeight], *, steps: int) -> dict[str, Any]:
    """Return the entry of a state dict.

    Args:
        form: How the weights are stored.
        weights: Number of a parameter in the state dict -> its stored weight.
        steps: Optimizer steps since the weights were stored, for stochastic rounding.
    """
    rests = {number: weight.rest for number, weight in weights.items() if weight.rest.numel()}
    return {"form": form, "steps": steps, "rests": rests}


def load_entry(entry: Mapping[str, Any], form: str, weights: Mapping[int, StoredWeight | None]) -> int:
    """Load what was saved of weights; the model's own state dict holds the other half.

    Args:
        entry: Of a state dict.
        form: How the weights are stored here.
        weights: Number of a parameter -> its stored weight, None where it is stored as it is.

    Returns:
        The optimizer steps taken so far.
    """
    if entry["form"] != form:
        if entry["rests"]:
            warn_user(
                f"the checkpoint was written with weights={entry['form']!r}, this run has weights={form!r}: "
                "it goes on from the 16 bits that the model had, what they lack of float32 is left out. "
                f"To keep it, load with weights={entry['form']!r} or weights='fp32'",
            )
        return int(entry["steps"])
    for number, rest in entry["rests"].items():
        weight = weights.get(number)
        if weight is not None:
            weight.load_rest(rest)
    return int(entry["steps"])


def exact_value(entry: Mapping[str, Any], number: int, value: Tensor) -> Tensor | None:
    """Return a weight in float32 as it was saved, None if the entry is not of this weight.

    Args:
        entry: Of a state dict.
        number: Of the parameter in it.
        value: What the model's state dict held, in any floating dtype.
    """
    rest = entry["rests"].get(number)
    if rest is None or rest.shape != value.shape:
        return None
    rest = rest.to(value.device)
    if rest.dtype is torch.float32:
        return rest if torch.equal(rest.to(torch.float16), value.to(torch.float16)) else None
    high, exact = value.to(torch.bfloat16), torch.empty_like(rest, dtype=torch.float32)
    if not torch.equal(high.to(value.dtype), value):
        return None
    torch.ops.amp_plugin.unpack_weights_([high], [rest], [exact])
    return exact
