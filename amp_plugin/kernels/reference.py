"""Each op in plain torch: the oracle of the tests and the fallback everywhere.

Written to be read, not to be fast: one tensor at a time, norms in float64
(float32 on devices without it). The contract is in :mod:`amp_plugin.kernels.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INF_FLAG = 1
NAN_FLAG = 2


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _flat_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all elements as one vector, in the widest float of the device."""
    dtype = _wide(device)
    parts = [g for g in grads if g.numel()]
    if not parts:
        return torch.zeros((), dtype=dtype, device=device)
    if norm_type == 0:  # a count: torch's total norm counts tensors here, a flat vector counts elements
        return torch.stack([(g != 0).sum() for g in parts]).sum().to(dtype)
    norms = [torch.linalg.vector_norm(g.abs().to(dtype), norm_type) for g in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _flags(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One byte per tensor: bit 0 inf, bit 1 nan."""
    if not tensors:
        return torch.zeros((0,), dtype=torch.uint8, device=device)
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    inf = torch.stack([t.isinf().any() for t in real])
    nan = torch.stack([t.isnan().any() for t in real])
    return inf.to(torch.uint8) * INF_FLAG + nan.to(torch.uint8) * NAN_FLAG


def _found(flags: Tensor) -> Tensor:
    return (flags != 0).any().to(torch.float32)


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """``grad * factor``, rounded once, in the dtype of ``grad``."""
    wide = torch.float64 if grad.dtype in {torch.float64, torch.complex128} else torch.float32
    if grad.is_complex():
        return torch.view_as_complex(torch.view_as_real(grad.resolve_conj()) * factor.to(wide))
    return (grad.to(wide) * factor.to(wide)).to(grad.dtype)


def _write(grad: Tensor, factor: Tensor) -> None:
    grad.copy_(torch.where(factor == 1, grad, _product(grad, factor)))


def factor_of(inv_scale: Tensor, *, is_scale: bool) -> Tensor:
    """Return what gradients are multiplied by, 0-dim."""
    factor = inv_scale.reshape(())
    return factor.reciprocal() if is_scale else factor


@torch.no_grad()
def norm_check(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Measure gradients without touching them.

    Args:
        grads: Gradients, on one device, floating or complex, any shape and stride.
        inv_scale: One element, float32 or float64: what the gradients are to be multiplied by.
        norm_type: The p of the norm: any float, ``inf`` and ``-inf`` included.
        is_scale: Whether ``inv_scale`` is the scale: the gradients are then to be multiplied by 1/scale,
            rounded to its dtype.

    Returns:
        The norm of ``inv_scale * grads`` (float32, 0-dim), ``found_inf`` (float32, 0-dim, 0.0 or 1.0)
        and ``flags`` (uint8, one per gradient: bit 0 inf, bit 1 nan).
    """
    device, factor = inv_scale.device, factor_of(inv_scale, is_scale=is_scale)
    flags = _flags(grads, device)
    norm = _flat_norm(grads, norm_type, device)
    if norm_type != 0:
        norm = norm * factor.abs().to(norm.dtype)
    return norm.to(torch.float32), _found(flags), flags


@torch.no_grad()
def unscale_(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply gradients by ``inv_scale`` in place and measure the result.

    Args:
        grads: Gradients as for :func:`norm_check`; written.
        inv_scale: One element, float32 or float64.
        norm_type: The p of the norm.
        is_scale: As for :func:`norm_check`.

    Returns:
        As :func:`norm_check`; the norm is taken before rounding to the gradients' dtypes, and an
        element that only becomes infinite by the product is flagged too.
    """
    factor = factor_of(inv_scale, is_scale=is_scale)
    norm, _, flags = norm_check(grads, factor, norm_type)
    for grad in grads:
        _write(grad, factor)
    flags |= _flags(grads, inv_scale.device)
    return norm, _found(flags), flags


@torch.no_grad()
def multiply_(grads: Sequence[Tensor], factor: Tensor) -> Tensor:
    """Multiply gradients by a device-side factor; do nothing if it is 1.

    Args:
        grads: Gradients as for :func:`norm_check`; written.
        factor: One element, float32 or float64.

    Returns:
        ``found_inf``: 1.0 if a product is not finite; 0.0 if the factor is 1, whatever the gradients.
    """
    value = factor.reshape(())
    for grad in grads:
        _write(grad, value)
    return torch.where(value == 1, 0.0, _found(_flags(grads, factor.device))).to(torch.float32)


@torch.no_grad()
def cast(src: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Copy tensors into tensors of other dtypes, pair by pair.

    Args:
        src: Floating tensors.
        out: As many tensors of the same shapes; written.

    Raises:
        ValueError: The numbers of tensors differ.
    """
    if len(src) != len(out):
        msg = f"cast: {len(src)} tensors to copy and {len(out)} to write; give one output for each input"
        raise ValueError(msg)
    for source, copy in zip(src, out, strict=True):
        copy.copy_(source)


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    hysteresis_mode: int,
) -> None:
    """Adjust a loss scale after a step, on its device.

    The rule is torch's, with ``>=`` where torch compares the interval with ``==``, a floor and a
    ceiling, and hysteresis: overflows are tolerated until the tracker is used up::

        on overflow:   tracker = 0; hysteresis_tracker -= 1 (mode 2: not below 1)
                       if it was used up: scale = max(scale * backoff_factor, min_scale)
        on success:    tracker += 1; mode 0: hysteresis_tracker = hysteresis
                       if tracker >= growth_interval:
                           scale = min(scale * growth_factor, max_scale) if finite; tracker = 0
                           modes 1, 2: hysteresis_tracker = hysteresis

    Mode 0 is apex's ``update_scale_hysteresis`` (and DeepSpeed's ``consecutive_hysteresis=True``):
    any good step restores the tolerance. Mode 1 is Megatron-LM's ``DynamicGradScaler``, mode 2
    DeepSpeed's ``DynamicLossScaler``: only a whole growth interval does. With ``hysteresis=1`` all
    are torch's rule. A floor never raises, a ceiling never lowers a scale that was set by hand.

    Args:
        scale: float32, one element; written.
        growth_tracker: int32, one element; good steps since the last change; written.
        hysteresis_tracker: int32, one element; written.
        found_inf: float32, one element; more than 0 means overflow.
        growth_factor: Factor of a growth.
        backoff_factor: Factor of a backoff.
        growth_interval: Good steps before a growth.
        min_scale: Floor.
        max_scale: Ceiling.
        hysteresis: Overflows before a backoff, at least 1.
        hysteresis_mode: 0, 1 or 2, see above.
    """
    overflow = found_inf.reshape(scale.shape) > 0
    spent = hysteresis_tracker - overflow.to(torch.int32)
    backoff = overflow & ((spent <= 0) if hysteresis_mode != 2 else (hysteresis_tracker <= 1))
    steps = torch.where(overflow, 0, growth_tracker + 1)
    grow = ~overflow & (steps >= growth_interval)

    wide = scale if scale.device.type == "mps" else scale.double()  # torch multiplies in double
    lower = (wide * backoff_factor).float()
    lower = torch.maximum(lower, scale.clamp(max=min_scale))
    higher = (wide * growth_factor).float()
    higher = torch.where(higher.isfinite(), higher, scale)
    higher = torch.minimum(higher, scale.clamp(min=_as_float32(max_scale)))

    restored = ~overflow if hysteresis_mode == 0 else grow
    if hysteresis_mode == 2:
        spent = torch.where(backoff, hysteresis_tracker, spent)
    hysteresis_tracker.copy_(torch.where(restored, hysteresis, spent))
    growth_tracker.copy_(torch.where(grow, 0, steps))
    scale.copy_(torch.where(backoff, lower, torch.where(grow, higher, scale)))


def _as_float32(value: float) -> float:
    return min(value, torch.finfo(torch.float32).max) if not math.isnan(value) else value


@torch.no_grad()
def clip_factor(
    norm: Tensor, max_norm: float, scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """Find what clipping multiplies gradients by, or a fused optimizer divides scaled ones by::

        factor = min(1, max_norm / (norm + 1e-6)), 1 if a gradient is not finite (that step is skipped)
        result = factor, or scale / factor

    Finite gradients whose norm is beyond float32 become zeros, as torch makes them.

    Args:
        norm: float32, one element: the norm of the unscaled gradients.
        max_norm: Largest norm.
        scale: float32, one element: the loss scale the gradients still carry.
        found_inf: One element, above 0 if a gradient is not finite; None: if the norm is not.

    Returns:
        float32, 0-dim.
    """  # noqa: D415 - the formula belongs to the sentence
    value = norm.reshape(())
    skipped = value.isfinite().logical_not() if found_inf is None else found_inf.reshape(()) > 0
    factor = torch.clamp(max_norm / (value + 1e-6), max=1.0)
    factor = torch.where(skipped, 1.0, factor).to(torch.float32)
    return factor if scale is None else scale.reshape(()) / factor
