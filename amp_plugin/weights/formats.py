"""The formats that store a float32 weight as a 16-bit weight, which the model uses, and a remainder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops

HALVES: Final = frozenset({torch.bfloat16, torch.float16})
_Tensors = Sequence[Tensor]


class SplitBf16:
    """A bfloat16 weight and an int16 remainder, which together hold all bits of a float32 weight.

    SplitBf16 is also the base class of the other formats. Joining any 16-bit weight with any remainder gives
    a float32 number that rounds to this weight. Other code may therefore write the 16-bit weight without
    knowing about the remainder.
    """

    dtype = torch.bfloat16  # the dtype of the 16-bit weights
    # The number of bytes of the remainder for each element.
    kept_bytes = 2

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Split a float32 value. Return the 16-bit weight and the remainder as new tensors."""
        high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
        torch.ops.amp_plugin.pack_weights_([value], [high], [low])
        return high, low

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return the float32 weights, with the strides of the 16-bit weights."""
        masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        torch.ops.amp_plugin.unpack_weights_(weights, kept, masters)
        return masters

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Split the float32 weights ``masters``, and write them to existing 16-bit weights and remainders."""
        torch.ops.amp_plugin.pack_weights_(masters, weights, kept)


class Fp16WithMaster(SplitBf16):
    """A float16 weight and a float32 copy. Weights beyond 65504, float16's largest number, become inf."""

    dtype = torch.float16
    kept_bytes = 4

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float16 weight and a float32 copy."""
        return value.half(), value.clone(memory_format=torch.preserve_format)

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return the float32 copies.

        If other code has changed a 16-bit weight, the float32 copy of this weight is updated first.
        """
        for weight, master in zip(weights, kept, strict=True):
            torch.where(master.half() == weight, master, weight.float(), out=master)
        return list(kept)

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Write the weights and the float32 copies."""
        torch._foreach_copy_(list(weights), list(masters))
        for master, own in zip(masters, kept, strict=True):
            if (master.data_ptr(), master.stride()) != (own.data_ptr(), own.stride()):
                # The clone is needed because master and own may share memory but have different strides.
                own.copy_(master.clone())


class StochasticBf16(SplitBf16):
    """A bfloat16 weight without a remainder. Each step stores its result with stochastic rounding.

    Stochastic rounding rounds up or down at random, and the nearer bfloat16 number is more likely.
    """

    kept_bytes = 0

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bfloat16 weight and an empty tensor."""
        return value.bfloat16(), value.new_empty(0)

    def join(self, weights: _Tensors, kept: _Tensors) -> list[Tensor]:
        """Return the weights, converted to float32."""
        return [weight.float() for weight in weights]

    def store(self, masters: _Tensors, weights: _Tensors, kept: _Tensors, seed: int, step: int) -> None:
        """Write the weights with stochastic rounding. The random numbers depend on ``seed`` and ``step``."""
        torch.ops.amp_plugin.round_weights_(masters, weights, seed, step)


FORMATS: Final = {
    **dict.fromkeys(("bf16", "bf16-true"), SplitBf16()),
    **dict.fromkeys(("fp16", "fp16-true"), Fp16WithMaster()),
    "bf16-stochastic": StochasticBf16(),
}
