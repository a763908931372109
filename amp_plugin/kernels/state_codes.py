"""Encodes optimizer states in 16 and 8 bits, in plain torch. The kernels produce the same bits.

docs/decisions/compressed_state.md describes the formats. The random bits of an element depend only on its
position in memory and on the step count.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128
BLOCK_BYTES: Final = BLOCK + 4
_WORD: Final = 0xFFFFFFFF
_STRIDE: Final = 159
_LEAST_UNIT: Final = 2.0**-120
_MOST_NUMBER: Final = 2.0**127
_MOST_ROOT: Final = 2.0**63
_MOST_SIGNED: Final = 127
_MOST_UNSIGNED: Final = 255


def draws(numel: int, step: Tensor | float, state: int, device: torch.device) -> Tensor:
    """Return 16 random bits per element (int64) for stochastic rounding of a second moment.

    Only the bits of the first element in a block are drawn at random. The high bytes of the other elements
    are computed from these bits, so that no two elements of a block have the same high byte. ``state`` is 1
    for ``exp_avg_sq`` and 2 for the maximum of ``exp_avg_sq``. Only the low 32 bits of ``step`` matter.
    """
    number = step.to(torch.int64).reshape(()) if isinstance(step, Tensor) else int(step)
    places = torch.arange(numel, device=device)
    bits = random_bits(places // BLOCK, (number & _WORD) * 0x85EBCA77) >> (0 if state == 1 else 16)
    high = (bits + places % BLOCK) * _STRIDE & 0xFF
    return (high << 8) | (bits >> 8 & 0xFF)


def random_bits(numbers: Tensor, seed: Tensor | int) -> Tensor:
    """Return 32 random bits (as int64) for each of the given numbers."""
    bits = (numbers * 0x9E3779B1 + seed) & _WORD
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & _WORD
    bits = ((bits ^ (bits >> 12)) * 0x297A2D39) & _WORD
    return bits ^ (bits >> 15)


def to_bf16(flat: Tensor, drawn: Tensor | None = None) -> Tensor:
    """Round float32 numbers to bfloat16.

    If random bits ``drawn`` are given, rounding is stochastic. Otherwise, numbers are rounded to nearest.
    """
    if drawn is None:
        return flat.bfloat16()
    bits = flat.contiguous().view(torch.int32).to(torch.int64) + drawn
    rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(flat.isnan(), math.nan, rounded)  # a GPU's NaN bits would overflow to -0


def encode(flat: Tensor, *, signed: bool, drawn: Tensor | None = None, units: Tensor | None = None) -> Tensor:
    """Encode float32 numbers as 8-bit codes (uint8), padded to whole blocks.

    Negative numbers are allowed only if ``signed`` is True. If ``drawn`` is given (by :func:`draws`), second
    moments are rounded stochastically. Otherwise they are rounded to nearest. ``units`` (``[blocks, 1]``) has
    the scale of each block. By default the scale is computed from the largest number in the block.
    """
    kept = _kept(flat, signed=signed)
    blocks, unit = len(kept), _units(kept, signed=signed) if units is None else units
    inverse = torch.where(unit > _LEAST_UNIT, unit.reciprocal(), 0.0)
    if signed:
        root = ((kept.abs() * inverse).sqrt() + 0.5).clamp_max(_MOST_SIGNED)
        codes = root.copysign(kept).to(torch.int8).view(torch.uint8)
    else:
        share = torch.full((blocks * BLOCK,), 0x8000, device=flat.device)
        if drawn is not None:
            share[: flat.numel()] = drawn
        high, low = (share >> 8).view_as(kept), (share & 0xFF).view_as(kept)
        # The code is computed by a fused multiply-add followed by an addition.
        code = (kept.double() * inverse + low * 2.0**-16).float() + high * 2.0**-8
        codes = torch.where(kept == 0, 0, code.clamp(1, _MOST_UNSIGNED)).to(torch.uint8)
    return torch.cat([codes, unit.flatten().view(torch.uint8).view(blocks, 4)], 1).flatten()


def encode_exactly(flat: Tensor, *, signed: bool) -> Tensor:
    """Encode numbers that came from :func:`decode`, such that decoding them again gives the same numbers.

    Other numbers are rounded to the nearest codes. A block's scale cannot be computed exactly from its
    largest number, because the code of that number may have been rounded down by one. Therefore the scales
    next to the computed one are tried too.
    """
    kept = _kept(flat, signed=signed)
    asked_for = _units(kept, signed=signed)
    found = encode(flat, signed=signed).view(-1, BLOCK_BYTES)
    whole = torch.zeros_like(kept)
    whole.flatten()[: flat.numel()] = flat
    for less in (1.0,) if signed else (1.0, _MOST_UNSIGNED / (_MOST_UNSIGNED - 1)):
        for ulps in range(-3, 4):
            units = ((asked_for * less).view(torch.int32) + ulps).clamp_min(0).view(torch.float32)
            codes = encode(flat, signed=signed, units=units)
            same = (decode(codes, kept.numel(), signed=signed).view_as(kept) == whole).all(1, keepdim=True)
            found = torch.where(same, codes.view_as(found), found)
    return found.flatten()


def _kept(flat: Tensor, *, signed: bool) -> Tensor:
    """Return the values that :func:`encode` divides by the scales. Each row is one block of 128 values.

    Signed numbers are used as they are, and unsigned numbers are replaced by their square roots.
    """
    kept = flat.new_zeros((flat.numel() + BLOCK - 1) // BLOCK * BLOCK)
    kept[: flat.numel()] = (
        flat.clamp(-_MOST_NUMBER, _MOST_NUMBER) if signed else flat.sqrt().clamp_max(_MOST_ROOT)
    )
    return kept.view(-1, BLOCK)


def _units(kept: Tensor, *, signed: bool) -> Tensor:
    return kept.abs().amax(1, keepdim=True) * (1 / _MOST_SIGNED**2 if signed else 1 / _MOST_UNSIGNED)


def decode(codes: Tensor, numel: int, *, signed: bool) -> Tensor:
    """Decode 8-bit codes to float32 numbers of shape ``[numel]``."""
    blocks = codes.view(-1, BLOCK_BYTES)
    unit = blocks[:, BLOCK:].contiguous().view(torch.float32)
    if signed:
        code = blocks[:, :BLOCK].view(torch.int8).float()
        return (code * code.abs() * unit).flatten()[:numel]
    return (blocks[:, :BLOCK].float() * unit).square().flatten()[:numel]


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in memory order (1-dim). If the tensor is dense, the result is a view."""
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if not dense:
        return tensor.flatten()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
