"""The ops on torch's own multi-tensor kernels: what serves a GPU on which ours cannot run.

The contract of :mod:`amp_plugin.kernels.ops`, in a number of launches that hardly depends on the number of
tensors. The gradients are read once to measure and twice more to unscale, and where one gradient holds both
inf and nan its flags say nan only. float64 and complex gradients are done one by one, as in
:mod:`amp_plugin.kernels.reference`, which also has the ops on a few scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from amp_plugin.kernels import reference
from amp_plugin.kernels.reference import INF_FLAG, NAN_FLAG

_SHORT: Final = (torch.float16, torch.bfloat16, torch.float32)  # their squares and sums fit float64
_OF_TORCH: Final = {1.0, 2.0, float("inf")}  # norms that torch takes of many tensors at once

update_scale_ = reference.update_scale_
clip_factor = reference.clip_factor


@torch.no_grad()
def norm_check(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Measure gradients; see ``reference.norm_check``. B bytes read for the norms 1, 2 and inf, else 2B."""
    if not _all_short(grads):
        return reference.norm_check(grads, inv_scale, norm_type, is_scale)
    factor = reference.factor_of(inv_scale, is_scale=is_scale)
    order = norm_type if norm_type in _OF_TORCH else 2.0
    norms = _norms(grads, order, inv_scale.device)
    flags = _flags(norms)
    if norm_type in _OF_TORCH:
        filled = norms[[i for i, grad in enumerate(grads) if grad.numel()]] if len(norms) else norms
        norm = torch.linalg.vector_norm(filled, norm_type) if len(filled) else norms.sum()
        norm = (norm * factor.abs()).to(torch.float32)
    else:
        norm = reference.norm_check(grads, factor, norm_type)[0]
    return norm, _found(flags), flags


@torch.no_grad()
def unscale_(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply and measure gradients; see ``reference.unscale_``. 3B bytes read, B written."""
    if not _all_short(grads):
        return reference.unscale_(grads, inv_scale, norm_type, is_scale)
    factor = reference.factor_of(inv_scale, is_scale=is_scale)
    norm, _, flags = norm_check(grads, factor, norm_type)
    _multiply(grads, factor)
    flags |= _flags(_norms(grads, 2.0, inv_scale.device))
    return norm, _found(flags), flags


@torch.no_grad()
def multiply_(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients; see ``reference.multiply_``. 2B bytes read, B written."""
    if not _all_short(grads):
        return reference.multiply_(grads, factor)
    _multiply(grads, factor)
    found = _found(_flags(_norms(grads, 2.0, factor.device)))
    return torch.where(factor.reshape(()) == 1, 0.0, found).to(torch.float32)


@torch.no_grad()
def cast(src: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Copy tensors into tensors of other dtypes; see ``reference.cast``."""
    if len(src) != len(out):
        reference.cast(src, out)  # says what is wrong
    if len(src):
        torch._foreach_copy_(list(out), list(src))


def _all_short(grads: Sequence[Tensor]) -> bool:
    return all(grad.dtype in _SHORT for grad in grads)


def _by_dtype(grads: Sequence[Tensor]) -> list[list[int]]:
    """The positions of the tensors of each dtype: torch's kernels take one at a time."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, grad in enumerate(grads):
        groups.setdefault(grad.dtype, []).append(i)
    return list(groups.values())


def _norms(grads: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of each gradient, float64; 0 of an empty one."""
    found: list[Tensor] = [torch.zeros((), dtype=torch.float64, device=device)] * len(grads)
    for positions in _by_dtype(grads):
        filled = [i for i in positions if grads[i].numel()]
        if not filled:
            continue
        norms = torch._foreach_norm([grads[i] for i in filled], order, dtype=torch.float64)
        for i, norm in zip(filled, norms, strict=True):
            found[i] = norm
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64, device=device)


def _flags(norms: Tensor) -> Tensor:
    return norms.isinf().to(torch.uint8) * INF_FLAG + norms.isnan().to(torch.uint8) * NAN_FLAG


def _found(flags: Tensor) -> Tensor:
    return (flags != 0).any().to(torch.float32)


def _multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in float32 and round once, as torch.amp unscales; a factor of 1 changes nothing."""
    factor = factor.reshape(()).to(torch.float32)
    ignored = torch.zeros((), dtype=torch.float32, device=factor.device)
    for positions in _by_dtype(grads):
        torch._amp_foreach_non_finite_check_and_unscale_([grads[i] for i in positions], ignored, factor)
