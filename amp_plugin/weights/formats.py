"""How a weight is stored in 16 bits: what is kept beside it, and how both make a float32 again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops

HALVES: Final = frozenset({torch.bfloat16, torch.float16})
_Tensors = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A way to store weights; lists are of tensors of the same shapes.

    Attributes:
        dtype: That of the weights.
        kept_bytes: Bytes kept beside a weight.
        split: float32 value -> the weight and what is kept beside it, new tensors.
        join: Weights, what is kept beside them -> float32 masters of the weights' strides.
        store: Write weights, and what is kept beside them, from masters; with seed and step of rounding.
    """

    dtype: torch.dtype
    kept_bytes: int
    split: Callable[[Tensor], tuple[Tensor, Tensor]]
    join: Callable[[_Tensors, _Tensors], list[Tensor]]
    store: Callable[[_Tensors, _Tensors, _Tensors, int, int], None]


# bfloat16 and an int16 low half, together all bits of float32. Whatever low half stands beside a weight, both
# make a number that rounds to the weight, zero beside a zero: whoever writes a weight need not know of it.


def _split_pair(value: Tensor) -> tuple[Tensor, Tensor]:
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    torch.ops.amp_plugin.pack_weights_([value], [high], [low])
    return high, low


def _join_pairs(weights: _Tensors, kept: _Tensors) -> list[Tensor]:
    masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
    torch.ops.amp_plugin.unpack_weights_(weights, kept, masters)
    return masters


def _store_pairs(masters: _Tensors, weights: _Tensors, kept: _Tensors, _seed: int, _step: int) -> None:
    torch.ops.amp_plugin.pack_weights_(masters, weights, kept)


# float16 and the float32 master: beyond float16's largest number, 65504, a weight is infinite.


def _split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.half(), value.clone(memory_format=torch.preserve_format)


def _join_masters(weights: _Tensors, kept: _Tensors) -> list[Tensor]:
    """Return what is kept, with the elements that somebody else has written."""
    for weight, master in zip(weights, kept, strict=True):
        torch.where(master.half() == weight, master, weight.float(), out=master)
    return list(kept)


def _store_masters(masters: _Tensors, weights: _Tensors, kept: _Tensors, _seed: int, _step: int) -> None:
    torch.ops.amp_plugin.cast(masters, weights)
    for master, own in zip(masters, kept, strict=True):
        if master.data_ptr() != own.data_ptr():
            own.copy_(master)


# bfloat16 alone: a step's result is rounded up or down with the probability of its distance.


def _split_alone(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.bfloat16(), value.new_empty(0)


def _join_alone(weights: _Tensors, _kept: _Tensors) -> list[Tensor]:
    return [weight.float() for weight in weights]


def _round(masters: _Tensors, weights: _Tensors, _kept: _Tensors, seed: int, step: int) -> None:
    torch.ops.amp_plugin.round_weights_(masters, weights, seed, step)


_SPLIT_BF16: Final = Format(
    dtype=torch.bfloat16, kept_bytes=2, split=_split_pair, join=_join_pairs, store=_store_pairs
)
_FP16_WITH_MASTER: Final = Format(
    dtype=torch.float16, kept_bytes=4, split=_split_master, join=_join_masters, store=_store_masters
)
_STOCHASTIC_BF16: Final = Format(
    dtype=torch.bfloat16, kept_bytes=0, split=_split_alone, join=_join_alone, store=_round
)
FORMATS: Final[dict[str, Format]] = {
    "bf16": _SPLIT_BF16,
    "fp16": _FP16_WITH_MASTER,
    "bf16-stochastic": _STOCHASTIC_BF16,
    "bf16-true": _SPLIT_BF16,
    "fp16-true": _FP16_WITH_MASTER,
}
