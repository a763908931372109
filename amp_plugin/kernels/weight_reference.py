"""The ops on 16-bit weights in plain torch: the oracle of the tests and the fallback everywhere.

A float32 master is kept as a pair, 16 + 16 bits::

    high = (bits + 0x8000) >> 16          as bfloat16: the master, rounded to nearest, ties away from zero
    low  = bits - (high << 16)            as int16: what makes it the master again

Ties away from zero, because that is reversible: of ties to even, an even bfloat16 has 65537 originals and an
odd one 65535. Values that round beyond bfloat16's largest number have an infinite high half, and come back.
A NaN whose high half would not be a NaN (131070 of the 16777214) becomes the quiet NaN of its sign. Beside a
zero a low half counts for nothing, so that a written zero is one: numbers below 4.6e-41 are lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DRAWS = 8  # numbers of 16 bits from one call of the generator
_WORD = 0xFFFFFFFF


def _refuse_counts(op: str, masters: int, other: int, name: str) -> None:
    if masters != other:
        msg = f"{op}: {masters} masters and {other} {name}; give one for each master."
        raise ValueError(msg)


@torch.no_grad()
def pack_weights_(masters: Sequence[Tensor], high: Sequence[Tensor], low: Sequence[Tensor]) -> None:
    """Split float32 masters into the two halves of a pair.

    Args:
        masters: float32, any shapes and strides.
        high: As many bfloat16 tensors of the same shapes; written.
        low: As many int16 tensors of the same shapes; written.

    Raises:
        ValueError: The numbers of tensors differ.
    """
    _refuse_counts("pack_weights_", len(masters), len(high), "high halves")
    _refuse_counts("pack_weights_", len(masters), len(low), "low halves")
    for master, upper, lower in zip(masters, high, low, strict=True):
        bits = master.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        lost_nan = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
        bits = torch.where(lost_nan, (bits & -0x80000000) | 0x7FC00000, bits)
        rounded = (bits + 0x8000) >> 16
        upper.copy_(rounded.to(torch.int16).view(torch.bfloat16))
        lower.copy_((bits - (rounded << 16)).to(torch.int16))


@torch.no_grad()
def unpack_weights_(high: Sequence[Tensor], low: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Put the two halves of pairs together again.

    Args:
        high: bfloat16, any shapes and strides.
        low: As many int16 tensors of the same shapes.
        masters: As many float32 tensors of the same shapes; written.

    Raises:
        ValueError: The numbers of tensors differ.
    """
    _refuse_counts("unpack_weights_", len(masters), len(high), "high halves")
    _refuse_counts("unpack_weights_", len(masters), len(low), "low halves")
    for upper, lower, master in zip(high, low, masters, strict=True):
        highs = upper.view(torch.int16).to(torch.int32) << 16
        bits = highs + torch.where(upper == 0, 0, lower.to(torch.int32))
        master.copy_(bits.view(torch.float32))


@torch.no_grad()
def round_weights_(masters: Sequence[Tensor], out: Sequence[Tensor], seed: int, step: int) -> None:
    """Round masters to bfloat16, up or down with the probability of their distance.

    What is representable stays as it is. The draw for an element depends on ``seed``, ``step``, the number of
    its tensor in the list and its own number in it, and on nothing else: neither device nor threads.

    Args:
        masters: float32, any shapes and strides.
        out: As many bfloat16 tensors of the same shapes; written.
        seed: The low 32 bits count.
        step: The low 32 bits count.

    Raises:
        ValueError: The numbers of tensors differ.
    """
    _refuse_counts("round_weights_", len(masters), len(out), "outputs")
    for number, (master, rounded) in enumerate(zip(masters, out, strict=True)):
        bits = master.contiguous().view(torch.int32).to(torch.int64).flatten()
        draws = _draws(bits.numel(), number, seed, step, master.device)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        quiet = ((bits >> 16) & 0x8000) | 0x7FC0
        halves = torch.where(is_nan, quiet, (bits + draws) >> 16)
        rounded.copy_(halves.to(torch.int16).view(torch.bfloat16).view(master.shape))


def _draws(numel: int, tensor: int, seed: int, step: int, device: torch.device) -> Tensor:
    """Return ``numel`` numbers of 16 bits, int64: Philox 4x32-10 (Salmon et al., SC 2011)."""
    block = torch.arange((numel + _DRAWS - 1) // _DRAWS, device=device)
    words = [block & _WORD, block >> 32, torch.full_like(block, tensor), torch.zeros_like(block)]
    key0, key1 = seed & _WORD, step & _WORD
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ key0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ key1,
            first & _WORD,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).flatten()[:numel]
