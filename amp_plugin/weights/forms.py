"""The ways to store weights in 16 bits: what is kept beside them, and how masters are made of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.weights.stored_weight import StoredWeight

FormName = Literal["bf16", "fp16", "bf16-stochastic"]


class Form(Protocol):
    """A way to store weights.

    Attributes:
        name: As users write it.
        dtype: That of the weights.
        rest_bytes: Bytes kept beside a weight.
    """

    name: FormName
    dtype: torch.dtype
    rest_bytes: int

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight and the rest of a float32 value, new tensors of its shape and strides."""

    def settle(self, weights: Sequence[StoredWeight]) -> None:
        """Bring rests up to date with weights that somebody else has written."""

    def fill_masters(self, weights: Sequence[StoredWeight]) -> None:
        """Write the masters, which have memory."""

    def store_masters(self, weights: Sequence[StoredWeight], *, seed: int, step: int) -> None:
        """Write weights and rests from the masters."""


class Pair:
    """bfloat16 and an int16 low half: together all bits of float32.

    Any two halves make a number that rounds to the high one: where somebody else has written a weight
    unnoticed (``.data``), the old low half moves it by less than bfloat16 can show.
    """

    name: FormName = "bf16"
    dtype = torch.bfloat16
    rest_bytes = 2

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Form.split`."""
        high, low = torch.empty_like(value, dtype=self.dtype), torch.empty_like(value, dtype=torch.int16)
        torch.ops.amp_plugin.pack_weights_([value], [high], [low])
        return high, low

    def settle(self, weights: Sequence[StoredWeight]) -> None:
        """As :meth:`Form.settle`."""
        for weight in weights:
            weight.settle()
            if weight.is_written:
                weight.rest.zero_()
            weight.note_written()

    def fill_masters(self, weights: Sequence[StoredWeight]) -> None:
        """As :meth:`Form.fill_masters`."""
        torch.ops.amp_plugin.unpack_weights_(*_columns(weights), [weight.master for weight in weights])

    def store_masters(self, weights: Sequence[StoredWeight], *, seed: int, step: int) -> None:
        """As :meth:`Form.store_masters`."""
        torch.ops.amp_plugin.pack_weights_([weight.master for weight in weights], *_columns(weights))
        for weight in weights:
            weight.note_written()


class Masters:
    """float16 and the float32 master: beyond float16's largest number, 65504, a weight is infinite."""

    name: FormName = "fp16"
    dtype = torch.float16
    rest_bytes = 4

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Form.split`."""
        return value.to(self.dtype), value.clone(memory_format=torch.preserve_format)

    def settle(self, weights: Sequence[StoredWeight]) -> None:
        """As :meth:`Form.settle`; also where a weight was written unnoticed."""
        for weight in weights:
            weight.settle()
            same = weight.rest.to(self.dtype) == weight.param
            torch.where(same, weight.rest, weight.param.detach().float(), out=weight.rest)
            weight.note_written()

    def fill_masters(self, weights: Sequence[StoredWeight]) -> None:
        """Do nothing: the masters are kept."""

    def store_masters(self, weights: Sequence[StoredWeight], *, seed: int, step: int) -> None:
        """As :meth:`Form.store_masters`."""
        torch.ops.amp_plugin.cast(
            [weight.master.detach() for weight in weights], [weight.param.detach() for weight in weights]
        )
        for weight in weights:
            weight.note_written()


class Stochastic:
    """bfloat16 alone: a step's result is rounded up or down with the probability of its distance."""

    name: FormName = "bf16-stochastic"
    dtype = torch.bfloat16
    rest_bytes = 0

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Form.split`; rounded to nearest."""
        return value.to(self.dtype), value.new_empty(0, dtype=torch.int16)

    def settle(self, weights: Sequence[StoredWeight]) -> None:
        """As :meth:`Form.settle`."""
        for weight in weights:
            weight.settle()
            weight.note_written()

    def fill_masters(self, weights: Sequence[StoredWeight]) -> None:
        """As :meth:`Form.fill_masters`."""
        torch.ops.amp_plugin.cast(
            [weight.param.detach() for weight in weights], [weight.master.detach() for weight in weights]
        )

    def store_masters(self, weights: Sequence[StoredWeight], *, seed: int, step: int) -> None:
        """As :meth:`Form.store_masters`."""
        masters, params = [weight.master for weight in weights], [weight.param for weight in weights]
        torch.ops.amp_plugin.round_weights_(masters, params, seed, step)
        for weight in weights:
            weight.note_written()


FORMS: Final[dict[str, Form]] = {form.name: form for form in (Pair(), Masters(), Stochastic())}


def _columns(weights: Sequence[StoredWeight]) -> tuple[list[Tensor], list[Tensor]]:
    return [weight.param for weight in weights], [weight.rest for weight in weights]
