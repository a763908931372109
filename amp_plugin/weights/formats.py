"""The formats of a stored weight: 16 bits that the model computes with, and what they lack of float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops

HALVES: Final = frozenset({torch.bfloat16, torch.float16})
_Tensors = Sequence[Tensor]


class SplitBf16:
    """bfloat16 and an int16 low half, together all bits of float32; the base of the other ways.

    Any low half and a weight make a number that rounds to the weight: whoever writes one need not know of it.
    """

    dtype = torch.bfloat16  # of the weights
    kept_bytes = 2  # next to a weight

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of a float32 value and what is kept next to it, new tensors."""
        high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
        torch.ops.amp_plugin.pack_weights_([value], [high], [low])
        return high, low

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return float32 masters of the weights' strides."""
        masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        torch.ops.amp_plugin.unpack_weights_(weights, kept, masters)
        return masters

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Write weights, and what is kept next to them, from masters."""
        torch.ops.amp_plugin.pack_weights_(masters, weights, kept)


class Fp16WithMaster(SplitBf16):
    """float16 and the float32 master: beyond float16's largest number, 65504, a weight is infinite."""

    dtype = torch.float16
    kept_bytes = 4

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return float16, and the value itself."""
        return value.half(), value.clone(memory_format=torch.preserve_format)

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return what is kept, with the elements that somebody else has written."""
        for weight, master in zip(weights, kept, strict=True):
            torch.where(master.half() == weight, master, weight.float(), out=master)
        return list(kept)

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Write both."""
        torch._foreach_copy_(list(weights), list(masters))
        for master, own in zip(masters, kept, strict=True):
            if (master.data_ptr(), master.stride()) != (own.data_ptr(), own.stride()):
                own.copy_(master.clone())  # it may be the same memory, transposed


class StochasticBf16(SplitBf16):
    """bfloat16 alone: a step's result is rounded up or down with the probability of its distance."""

    kept_bytes = 0

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return bfloat16, and nothing."""
        return value.bfloat16(), value.new_empty(0)

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return the weights, widened."""
        return [weight.float() for weight in weights]

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Write weights, rounded up or down as seed and step draw it."""
        torch.ops.amp_plugin.round_weights_(masters, weights, seed, step)


FORMATS: Final = {
    **dict.fromkeys(("bf16", "bf16-true"), SplitBf16()),
    **dict.fromkeys(("fp16", "fp16-true"), Fp16WithMaster()),
    "bf16-stochastic": StochasticBf16(),
}
