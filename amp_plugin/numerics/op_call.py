"""One call of an op: its tensors by the names of the arguments, and which results belong to which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_plugin.numerics.op_traits import OpTraits

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that hold their numbers themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """A tensor that an op was given, or one it returned.

    Attributes:
        name: of the argument; empty for a result.
        index: its place in a list of tensors; None outside lists.
        tensor: the tensor.
    """

    name: str
    index: int | None
    tensor: Tensor

    @property
    def label(self) -> str:
        """The name, with the place in the list."""
        return self.name if self.index is None else f"{self.name}[{self.index}]"


def arguments_of(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    """Return the floating-point and complex tensors among an op's arguments, in order."""
    named = [*zip(traits.arguments, args, strict=False), *kwargs.items()]
    if kwargs.get("beta") == 0:  # what addmm and its kin add is not read then
        named = [(name, value) for name, value in named if name != "self"]
    return [argument for name, value in named for argument in _tensors(name, value)]


def results_of(output: Any) -> list[Argument]:
    """Return the floating-point and complex tensors among an op's results."""
    values = output if isinstance(output, tuple) else (output,)
    return [result for value in values for result in _tensors("", value)]


def made_by(traits: OpTraits, arguments: Sequence[Argument], output: Any) -> list[Argument]:
    """Return what an op has made: the arguments it has written, and the results that are none of these.

    A result that is written in parts only is left out.
    """
    written = [argument for argument in arguments if argument.name in traits.written]
    known = {id(argument.tensor) for argument in written} | {id(output[i]) for i in traits.partly_unwritten}
    return [*written, *(result for result in results_of(output) if id(result.tensor) not in known)]


def scalars_of(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return the Python numbers among an op's arguments by their names, those in lists too."""
    found: dict[str, float] = {}
    for name, value in [*zip(traits.arguments, args, strict=False), *kwargs.items()]:
        if isinstance(value, (list, tuple)):
            numbers = [entry for entry in value if isinstance(entry, float)]
            found |= {f"{name}[{index}]": number for index, number in enumerate(numbers)}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _tensors(name: str, value: Any) -> Iterator[Argument]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield Argument(name=name, index=None, tensor=value)
    elif isinstance(value, (list, tuple)):
        for index, tensor in enumerate(value):
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                yield Argument(name=name, index=index, tensor=tensor)


def is_low_precision(dtype: torch.dtype) -> bool:
    """Say whether a floating-point dtype has fewer bits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
