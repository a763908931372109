"""List rounding steps that a generator may take but its trainer does not, and emulate them in the trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch

from amp_plugin.numerics.emulated_rounding import ATTENTION, AttentionInSteps, EmulatedRounding, OpPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A rounding that the generator may perform, and that may explain the gap.

    Attributes:
        name: A description of the rounding in words.
        setting: The generator's setting that removes the rounding, as a pair of its name and its value. Both
            strings are empty if no setting removes the rounding.
        places: The ops whose results or operands are rounded.
        attention: The rounding inside attention, as a key of ``ATTENTION``. ``attention`` is empty if the
            rounding is not inside attention.
    """

    name: str
    setting: tuple[str, str]
    places: tuple[OpPlace, ...] = ()
    attention: str = ""

    @property
    def size(self) -> int:
        """The number of ops with this rounding."""
        return len({place.operands for place in self.places}) + bool(self.attention)

    @property
    def is_cause(self) -> bool:
        """Whether a setting of the generator (the inference engine) can avoid this rounding.

        Differences between fused attention kernels do not count as causes, because no setting avoids them.
        """
        return bool(self.setting[0])


_STEPS: Final = Suspect(name="the attention runs in steps", setting=("", ""), attention="as fused")


_ROTARY: Final = re.compile(r"(rotary|rope)\w*\.\w+\.(cos|sin)$|\.\w*(rotary|rope)\w*\.\w+$", re.IGNORECASE)
_ATTENTION_SETTINGS: Final = {
    "softmax": ("softmax", "float32"),
    "scale": ("attention scale", "before the cast"),
    "cache": ("kv_cache_dtype", "the dtype of the model"),
}


def suspects_of(
    found: Mapping[OpPlace, tuple[int, ...]], head: OpPlace | None, dtype: torch.dtype
) -> list[Suspect]:
    """Return the rounding steps that a generator may take at places where the trainer does not round.

    Args:
        found: The ops of the trainer whose results are wider than ``dtype``, in the order of execution. The
            dict maps each op to the shape of its result.
        head: The op in ``found`` that computes the logits. None if the logits are not wider than ``dtype``.
        dtype: The dtype to which the generator may round.
    """
    short = str(dtype).removeprefix("torch.")
    suspects = [_STEPS]
    for place in found:
        is_head = place == head
        name = f"the head computes in {short} ({place})" if is_head else f"{place} rounds to {short}"
        setting = ("head", "float32") if is_head else (f"{place}", "float32")
        both = (place, place.operands) if place.is_product else (place,)
        suspects.append(Suspect(name=name, setting=setting, places=both))
        if place.is_product:
            told = name.replace("computes in", "casts its operands to").replace(
                "rounds", "rounds its operands"
            )
            suspects.append(Suspect(name=told, setting=setting, places=(place.operands,)))
    suspects += _groups(found, short)
    suspects += [
        Suspect(name=f"{words} to {short}" if name == "softmax" else words, setting=setting, attention=name)
        for name, words in ATTENTION.items()
        for setting in [_ATTENTION_SETTINGS[name]]
    ]
    return suspects


def _groups(found: Mapping[OpPlace, tuple[int, ...]], short: str) -> Iterator[Suspect]:
    """Yield groups of ops whose rounding may cause the gap, such as all calls to one op in a function."""
    scopes: dict[str, list[OpPlace]] = {}
    ops: dict[str, list[OpPlace]] = {}
    for place in found:
        if not place.is_product:
            scopes.setdefault(place.scope, []).append(place)
            ops.setdefault(f"{place.op} in {place.scope}", []).append(place)
    named = {f"{op} rounds to {short} on each line": (op, places) for op, places in ops.items()}
    named |= {f"{scope} computes in {short}": (scope, places) for scope, places in scopes.items()}
    rotary = [place for place in found if _ROTARY.search(f"{place.scope}.{place.op}")]
    named[f"the rotary embedding computes in {short}"] = ("rotary embedding", rotary)
    embedded = {shape for place, shape in found.items() if place.op == "embedding"}
    stream = [p for p, shape in found.items() if p.op == "embedding" or (p.op == "add" and shape in embedded)]
    named[f"the residual stream is kept in {short}"] = ("residual stream", stream)
    named[f"all results are rounded to {short}"] = ("dtype of activations", [*found])
    for name, (setting, places) in named.items():
        if len(places) > 1:
            yield Suspect(name=name, setting=(setting, "float32"), places=tuple(places))


def emulated(suspects: Sequence[Suspect], dtype: torch.dtype) -> Iterator[AbstractContextManager[object]]:
    """Yield context managers that emulate the suspected rounding to ``dtype`` in the trainer."""
    places = {place for suspect in suspects for place in suspect.places}
    attention = {suspect.attention for suspect in suspects if suspect.attention}
    if places:
        yield EmulatedRounding(dtype, places)
    if attention:
        yield AttentionInSteps(dtype, attention)
