"""Implements each op in plain torch, as an oracle for tests and as a fallback for every device.

Tensors are processed one at a time in float64 (or float32 on devices without float64), and results are
rounded once when they are written. :mod:`amp_plugin.kernels.ops` states the contract of the ops.

**Ranks.** The norms of different ranks cannot be added, but the p-th powers of these norms can. Each rank
therefore sends one float64 sum of ``norm ** p`` per sharding layout. The last number that a rank sends is 1
if any of its gradients is not finite, and 0 otherwise. A single collective adds up the sums and the flags of
all ranks. If p is inf, the collective takes the maximum of the norms instead. If p is -inf, the collective
takes the maximum of the negated norms.

**Weights.** A float32 weight is stored as a pair of two 16-bit halves, as docs/decisions/weights_in_pairs.md
explains.

**Steps.** :func:`step_` performs the step of any optimizer that has a rule in :data:`RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from amp_plugin.hardware import in_widest_float, widest_float
from amp_plugin.kernels.state_codes import decode, draws, encode, in_memory_order, random_bits, to_bf16

INF_FLAG = 1
NAN_FLAG = 2
_WORD = 0xFFFFFFFF
# The codes of the spike actions "clip" and "raise". The code of "skip" is 0.
_CLIP, _RAISE = 1, 2
# For norms of these orders p, ranks combine the norms themselves instead of their p-th powers.
_NO_POWER = {0, math.inf, -math.inf}


def _flat_norm(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all gradients, joined into one vector, in the device's widest float dtype."""
    dtype = widest_float(device)
    parts = [g for g in grads if g.numel()]
    if not parts:
        return torch.zeros((), dtype=dtype, device=device)
    # For p = 0 the norm of all gradients is the number of nonzero elements.
    # For p = 0 torch's total norm would be the number of tensors that are not zero.
    if norm_type == 0:
        return torch.stack([(g != 0).sum() for g in parts]).sum().to(dtype)
    norms = [torch.linalg.vector_norm(g.abs().to(dtype), norm_type) for g in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _flags(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one byte per tensor. Bit 0 is set if the tensor contains inf, and bit 1 if it contains nan."""
    if not tensors:
        return torch.zeros((0,), dtype=torch.uint8, device=device)
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    inf = torch.stack([t.isinf().any() for t in real])
    nan = torch.stack([t.isnan().any() for t in real])
    return inf.to(torch.uint8) * INF_FLAG + nan.to(torch.uint8) * NAN_FLAG


def _found(flags: Tensor) -> Tensor:
    return (flags != 0).any().to(torch.float32)


def _multiply(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place, rounding each product once. A factor of 1 changes nothing."""
    wide = torch.float64 if grad.dtype in {torch.float64, torch.complex128} else torch.float32
    if grad.is_complex():
        product = torch.view_as_complex(torch.view_as_real(grad.resolve_conj()) * factor.to(wide))
    else:
        product = (grad.to(wide) * factor.to(wide)).to(grad.dtype)
    grad.copy_(torch.where(factor == 1, grad, product))


def _factor_of(inv_scale: Tensor, *, is_scale: bool) -> Tensor:
    factor = inv_scale.reshape(())
    return factor.reciprocal() if is_scale else factor


@torch.no_grad()
def norm_check(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(norm, found_inf, flags)`` for ``inv_scale * grads`` without modifying the gradients.

    If ``is_scale`` is True, ``inv_scale`` is the loss scale itself, and the factor is its reciprocal.
    """
    device, factor = inv_scale.device, _factor_of(inv_scale, is_scale=is_scale)
    flags = _flags(grads, device)
    norm = _flat_norm(grads, norm_type, device)
    if norm_type != 0:
        norm = norm * factor.abs().to(norm.dtype)
    return norm.to(torch.float32), _found(flags), flags


@torch.no_grad()
def unscale_(
    grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0, is_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply gradients by ``inv_scale`` in place. Return the same results as :func:`norm_check`.

    The norm is computed before the products are rounded to the gradients' dtypes. Products that overflow also
    set ``found_inf`` and ``flags``.
    """
    factor = _factor_of(inv_scale, is_scale=is_scale)
    norm, _, flags = norm_check(grads, factor, norm_type)
    for grad in grads:
        _multiply(grad, factor)
    flags |= _flags(grads, inv_scale.device)
    return norm, _found(flags), flags


@torch.no_grad()
def multiply_(
    grads: Sequence[Tensor],
    factor: Tensor,
    max_norm: float | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Multiply gradients by a factor in place. Return ``found_inf`` of the products.

    If ``max_norm`` is given, ``factor`` is a norm, and the gradients are multiplied by ``clip_factor(factor,
    max_norm, None, found_inf)``. If the multiplier is 1, nothing is written and the result is 0.
    """
    value = factor.reshape(()) if max_norm is None else clip_factor(factor, max_norm, None, found_inf)
    for grad in grads:
        _multiply(grad, value)
    return torch.where(value == 1, 0.0, _found(_flags(grads, factor.device))).to(torch.float32)


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
    """Update a loss scale on its device after an optimizer step.

    The rule is torch's, with these changes. The scale has a minimum and a maximum. Hysteresis tolerates some
    overflows before the scale is lowered. The scale also grows if the growth tracker is above the growth
    interval, whereas torch requires the two to be equal.

    - After an overflow, ``growth_tracker`` becomes 0 and ``hysteresis_tracker`` is lowered by 1. In mode 2
      ``hysteresis_tracker`` is never lowered below 1.
    - If ``hysteresis_tracker`` was 1 or less before an overflow, the scale becomes ``max(scale *
      backoff_factor, min_scale)``.
    - After a step without an overflow, ``growth_tracker`` is raised by 1. When ``growth_tracker`` reaches
      ``growth_interval``, it is reset to 0 and the scale becomes ``min(scale * growth_factor, max_scale)``.
      If the product is infinite, the scale stays the same.

    In mode 0 any step without an overflow resets ``hysteresis_tracker`` to ``hysteresis``, as in apex's
    ``update_scale_hysteresis`` and DeepSpeed's ``consecutive_hysteresis=True``. In mode 1 (Megatron-LM's
    ``DynamicGradScaler``) and mode 2 (DeepSpeed's ``DynamicLossScaler``) only a complete growth interval
    resets ``hysteresis_tracker``. With ``hysteresis=1`` all modes update the scale exactly as torch does. A
    scale that the user has set outside the limits is not clamped to them.
    """
    overflow = found_inf.reshape(scale.shape) > 0
    backoff = overflow & (hysteresis_tracker <= 1)
    steps = torch.where(overflow, 0, growth_tracker + 1)
    # An interval of 2^31 or more would overflow in a comparison with an int32 tensor.
    grow = ~overflow & (steps >= min(growth_interval, torch.iinfo(torch.int32).max))

    wide = in_widest_float(scale)  # as torch does
    lower = torch.maximum((wide * backoff_factor).float(), scale.clamp(max=min_scale))
    higher = (wide * growth_factor).float()
    higher = torch.where(higher.isfinite(), higher, scale)
    higher = torch.minimum(higher, scale.clamp(min=min(max_scale, torch.finfo(torch.float32).max)))

    restored = ~overflow if hysteresis_mode == 0 else grow
    left = hysteresis_tracker - (overflow & ~backoff if hysteresis_mode == 2 else overflow).to(torch.int32)
    hysteresis_tracker.copy_(torch.where(restored, hysteresis, left))
    growth_tracker.copy_(torch.where(grow, 0, steps))
    scale.copy_(torch.where(backoff, lower, torch.where(grow, higher, scale)))


@torch.no_grad()
def clip_factor(
    norm: Tensor, max_norm: float, scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """Return the factor by which clipping multiplies gradients: ``min(1, max_norm / (norm + 1e-6))``.

    If a gradient is not finite, the factor is 1, because the step is skipped anyway. If ``scale`` is given,
    return ``scale / factor``, by which a fused optimizer divides the gradients. If gradients are finite but
    their norm overflows float32, clipping sets them to zero, as in torch. Without ``found_inf``, gradients
    count as finite if their norm is finite.
    """
    value = norm.reshape(())
    skipped = value.isfinite().logical_not() if found_inf is None else found_inf.reshape(()) > 0
    factor = torch.clamp(max_norm / (value + 1e-6), max=1.0)
    factor = torch.where(skipped, 1.0, factor).to(torch.float32)
    return factor if scale is None else scale.reshape(()) / factor


@torch.no_grad()
def judge_step_(
    values: Sequence[Tensor],
    norm: Tensor,
    found_inf: Tensor,
    statistics: Tensor,
    growth_trackers: Sequence[Tensor],
    sigma: float,
    window: int,
    warmup: int,
    least_deviation: float,
    action: int,
) -> Tensor:
    """Decide on the device whether a step is a spike, and update the statistics of earlier steps.

    The value of a step is ``sum(values)``. The limit is the mean of earlier values, plus ``sigma`` times the
    larger of the standard deviation and ``least_deviation * |mean|``. A step is a spike if its value is above
    the limit or NaN. A step does not count as a spike if it is one of the first ``warmup`` steps, if a
    gradient overflowed, or if ``held`` is 1. A spike has one of these effects:

    - Action 0, skip: The step is skipped.
    - Action 1, clip: The gradients are multiplied by ``min(1, mean / (norm + 1e-6))``.
    - Action 2, raise: The step is skipped, and all later steps are held (skipped too) until ``held`` is set
      to 0.

    If a step is skipped without an overflow, each growth tracker is lowered by 1, because the next update of
    the scale will raise it by 1.

    The statistics are updated with the value of each step. After warm-up, if a value is above the limit, the
    statistics are updated with the limit instead. Therefore a single spike raises the limit only slightly.
    After a lasting rise in the values, the limit catches up within some steps. The statistics stay unchanged
    if a gradient overflowed, if ``held`` is 1, or if the new value is not finite. During the first ``window``
    steps the mean is an arithmetic mean, and afterwards it is an exponential moving average.

    Args:
        values: One-element tensors (float32 or float64, on the same device). The sum of ``values`` is
            compared with the limit.
        norm: The current norm of the gradients (float32, 0-dim).
        found_inf: 1.0 if a gradient is not finite, else 0.0 (float32, 0-dim).
        statistics: A float32 tensor ``[4]`` with the mean, the variance, ``steps`` and ``held``.
        growth_trackers: The growth trackers of the loss scales (int32, 0-dim).
        sigma: The number of standard deviations above the mean at which a step counts as a spike.
        window: The number of steps over which the values are averaged.
        warmup: The number of steps that must come before a step can count as a spike.
        least_deviation: The lower limit for the standard deviation, as a fraction of the mean.
        action: The number of the action at a spike: 0, 1 or 2.

    Returns:
        A float32 tensor of 6 elements. The first element is 1 if the step is skipped, else 0. The second
        element is the factor by which the gradients must be multiplied. The third element is 1 for a spike, 2
        for a step that is finite while ``held`` is 1, and otherwise 0. The fourth element is ``sum(values)``.
        The fifth element is the limit, or float32's largest number during warm-up. The sixth element is
        ``norm`` times the second element.
    """
    mean, variance, steps, held_before = (number.clone() for number in statistics)
    value = torch.stack([value.reshape(()).to(mean.dtype) for value in values]).sum()
    overflow, held = found_inf.reshape(()) > 0, held_before > 0
    limit = mean + sigma * torch.maximum(variance.sqrt(), least_deviation * mean.abs())
    warm = steps >= warmup
    ordinary = value <= limit
    spike = warm & ~overflow & ~held & ~ordinary
    learned = torch.where(warm & ~ordinary, limit, value)
    learns = learned.isfinite() & ~overflow & ~held
    count = (steps + 1).clamp(max=window)
    change = learned - mean
    wider = (1 - 1 / count) * (variance + change * change / count)
    factor = torch.ones_like(mean)
    if action == _CLIP:
        factor = torch.where(spike, (mean / (norm.reshape(()) + 1e-6)).clamp(max=1.0), factor)
    skipped = overflow | (held if action == _CLIP else held | spike)
    now_held = held | spike if action == _RAISE else held
    after = torch.stack([mean + change / count, wider, count])
    statistics[:3].copy_(torch.where(learns, after, statistics[:3]))
    statistics[3].copy_(now_held)
    for tracker in growth_trackers:
        tracker.sub_((skipped & ~overflow).to(tracker.dtype))
    code = torch.where(held & ~overflow, 2.0, spike.float())
    shown = torch.where(warm, limit, torch.finfo(torch.float32).max)
    return torch.stack([skipped.float(), factor, code, value, shown, norm.reshape(()) * factor]).to(
        torch.float32
    )


@torch.no_grad()
def pack_measurements_(
    packed: Tensor,
    norms: Sequence[Tensor],
    found_infs: Sequence[Tensor],
    slots: Sequence[int],
    replicas: Sequence[int],
    norm_type: float,
) -> None:
    """Write to ``packed`` (``[len(replicas) + 1]``) the numbers that a collective will combine over ranks.

    Args:
        packed: A float64 tensor with one element per sharding layout, and ``found_inf`` as the last element.
        norms: The norms of groups of gradients.
        found_infs: The ``found_inf`` of each group of gradients.
        slots: For each norm, the index of its sharding layout in ``packed``.
        replicas: For each sharding layout, the number of ranks that hold the same gradients. Ranks with the
            same gradients all send the same ``norm ** p``, so each rank first divides it by the number of
            these ranks.
        norm_type: The order of the norm.
    """
    fits = len(norms) == len(slots) and all(0 <= slot < len(replicas) for slot in slots)
    if not fits or packed.shape != (len(replicas) + 1,):
        msg = (
            f"pack_measurements_: got {len(norms)} norms, slots {list(slots)}, {len(replicas)} replicas and "
            f"packed of shape {list(packed.shape)}; give one slot below {len(replicas)} for each norm, and "
            "one element more than there are replicas"
        )
        raise ValueError(msg)
    values = []
    for slot, count in enumerate(replicas):
        members = [norm for norm, of in zip(norms, slots, strict=True) if of == slot]
        power = _power(members, norm_type, packed)
        values.append(power if math.isinf(norm_type) else power / count)
    flags = [flag.reshape(()).to(packed.dtype) for flag in found_infs]
    values.append(torch.stack(flags).max() if flags else packed.new_zeros(()))
    packed.copy_(torch.stack(values))


@torch.no_grad()
def unpack_measurements(packed: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Return the norm and ``found_inf``. The last element of the last tensor in ``packed`` is found_inf."""
    if not packed:
        msg = "unpack_measurements: got no packed measurements; give at least one"
        raise ValueError(msg)
    total = _join(torch.cat([values[:-1] for values in packed]), norm_type)
    if norm_type == -math.inf:
        total = -total
    norm = total if norm_type in _NO_POWER else total.pow(1.0 / norm_type)
    return norm.to(torch.float32), (packed[-1][-1] > 0).to(torch.float32)


def _power(norms: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """Return the sum (or maximum) of the norms' p-th powers as a 0-dim tensor, even if there are no norms."""
    wide = torch.stack([norm.reshape(()).to(like.dtype) for norm in norms]) if norms else like.new_empty(0)
    if norm_type == -math.inf:
        wide = -wide
    return _join(wide if norm_type in _NO_POWER else wide.pow(norm_type), norm_type)


def _join(powers: Tensor, norm_type: float) -> Tensor:
    if powers.numel() == 0:
        return powers.new_full((), -math.inf if norm_type == -math.inf else 0.0)
    return powers.max() if math.isinf(norm_type) else powers.sum()


def _refuse_counts(op: str, masters: Sequence[Tensor], **others: Sequence[Tensor]) -> None:
    for name, tensors in others.items():
        if len(tensors) != len(masters):
            counts = f"{len(masters)} masters and {len(tensors)} {name.replace('_', ' ')}"
            msg = f"{op}: {counts}; give one for each master."
            raise ValueError(msg)


@torch.no_grad()
def pack_weights_(masters: Sequence[Tensor], high: Sequence[Tensor], low: Sequence[Tensor]) -> None:
    """Split float32 weights into pairs of a bfloat16 and an int16 tensor of the same shape.

    The bfloat16 tensor holds the weights rounded to nearest. Ties are rounded away from zero, so that the
    split is reversible. A NaN that would not be a NaN in bfloat16 is replaced by the default NaN.
    """
    _refuse_counts("pack_weights_", masters, high_halves=high, low_halves=low)
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
    """Join the two halves of each pair into a float32 weight."""
    _refuse_counts("unpack_weights_", masters, high_halves=high, low_halves=low)
    for upper, lower, master in zip(high, low, masters, strict=True):
        highs = upper.view(torch.int16).to(torch.int32) << 16
        bits = highs + torch.where(upper == 0, 0, lower.to(torch.int32))
        master.copy_(bits.view(torch.float32))


@torch.no_grad()
def round_weights_(masters: Sequence[Tensor], out: Sequence[Tensor], seed: int, step: int) -> None:
    """Round float32 weights stochastically to one of the two neighbouring bfloat16 numbers.

    Numbers that bfloat16 can represent do not change. The random bits of an element depend only on the low 32
    bits of ``seed`` and ``step``, on the index of its tensor in the list, and on its index in the tensor. The
    random bits do not depend on the device or the number of threads.
    """
    _refuse_counts("round_weights_", masters, outputs=out)
    for number, (master, rounded) in enumerate(zip(masters, out, strict=True)):
        bits = master.contiguous().view(torch.int32).to(torch.int64).flatten()
        key = (step & _WORD) * 0x85EBCA77 + (seed & _WORD) * 0xC2B2AE3D + number * 0x27D4EB2F
        drawn = random_bits(torch.arange(bits.numel(), device=master.device), key & _WORD) & 0xFFFF
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        quiet = ((bits >> 16) & 0x8000) | 0x7FC0
        halves = torch.where(is_nan, quiet, (bits + drawn) >> 16)
        rounded.copy_(halves.to(torch.int16).view(torch.bfloat16).view(master.shape))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Defines what an optimizer step does to one parameter.

    Attributes:
        numbers: The names of the hyperparameters that the rule reads, in order. The first name is ``lr``.
        states: The kind of each state (``"signed"``, ``"square"``, ``"second square"`` or ``"weight"``), in
            order. Squares are never negative. Squares stored in 16 or 8 bits are rounded stochastically.
            Weights are always float32.
        apply: A function that takes a parameter, its gradient, its states, its counters after this step, and
            the hyperparameters by name. All tensors are float32 or wider. The function returns the new
            parameter and the new states.
        counters: The number of counters per parameter. The first counter counts the steps.
        count: A function that returns the new value of the second counter. The function takes the old value,
            the new value of the first counter, and the hyperparameters.
    """

    numbers: tuple[str, ...]
    states: tuple[str, ...] = ()
    apply: Callable[..., tuple[Tensor, ...]]
    counters: int = 0
    count: Callable[..., Tensor] | None = None


def _decayed(param: Tensor, grad: Tensor, n: SimpleNamespace) -> Tensor:
    weight_decay: float = n.weight_decay
    return (-grad if n.maximize else grad) + weight_decay * param


def _adam(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of Adam (Kingma and Ba, 2015).

    If weight decay is decoupled, the step is AdamW's (Loshchilov and Hutter, 2019). For AMSGrad a third state
    holds the largest ``exp_avg_sq`` so far.
    """
    exp_avg, exp_avg_sq, *largest = states
    (step,) = counters
    if n.decoupled:
        grad, param = -grad if n.maximize else grad, param * (1 - n.lr * n.weight_decay)
    else:
        grad = _decayed(param, grad, n)
    exp_avg = exp_avg + (1 - n.beta1) * (grad - exp_avg)
    exp_avg_sq = n.beta2 * exp_avg_sq + (1 - n.beta2) * grad * grad
    largest = [torch.maximum(square, exp_avg_sq) for square in largest]
    root = (largest or [exp_avg_sq])[0].sqrt()
    denominator = root / (1 - n.beta2**step).sqrt() + n.eps
    param = param - n.lr / (1 - n.beta1**step) * exp_avg / denominator
    return param, exp_avg, exp_avg_sq, *largest


def _sgd(
    param: Tensor, grad: Tensor, states: list[Tensor], _: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of SGD. The only state, if any, is the momentum buffer."""
    grad = direction = _decayed(param, grad, n)
    states = [n.momentum * buffer + (1 - n.dampening) * grad for buffer in states]
    for buffer in states:
        direction = grad + n.momentum * buffer if n.nesterov else buffer
    return param - n.lr * direction, *states


def _lion(
    param: Tensor, grad: Tensor, states: list[Tensor], _: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of Lion (Chen et al., 2023). Weight decay is always decoupled."""
    (exp_avg,) = states
    grad = -grad if n.maximize else grad
    direction = (n.beta1 * exp_avg + (1 - n.beta1) * grad).sign()
    param = (1 - n.lr * n.weight_decay) * param - n.lr * direction
    return param, n.beta2 * exp_avg + (1 - n.beta2) * grad


def _rmsprop(
    param: Tensor, grad: Tensor, states: list[Tensor], _: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of RMSprop (Tieleman and Hinton, 2012).

    The first state is ``square_avg``. Centered RMSprop also has the state ``grad_avg``. With momentum, the
    last state is the momentum buffer.
    """
    grad = _decayed(param, grad, n)
    square_avg, *others = states
    square_avg = variance = n.alpha * square_avg + (1 - n.alpha) * grad * grad
    moved = [square_avg]
    if n.centered:
        grad_avg = others.pop(0)
        moved.append(grad_avg + (1 - n.alpha) * (grad - grad_avg))
        variance = variance - moved[-1] * moved[-1]
    direction = grad / (variance.sqrt() + n.eps)
    for buffer in others:
        direction = n.momentum * buffer + direction
        moved.append(direction)
    return param - n.lr * direction, *moved


def _centered(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    return _rmsprop(param, grad, states, counters, SimpleNamespace(**vars(n), centered=True))


def _not_centered(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    return _rmsprop(param, grad, states, counters, SimpleNamespace(**vars(n), centered=False))


def _adagrad(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of Adagrad (Duchi et al., 2011). The state is the sum of the squared gradients."""
    grad = _decayed(param, grad, n)
    total = states[0] + grad * grad
    rate = n.lr / (1 + (counters[0] - 1) * n.lr_decay)
    return param - rate * grad / (total.sqrt() + n.eps), total


def _adadelta(
    param: Tensor, grad: Tensor, states: list[Tensor], _: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of Adadelta (Zeiler, 2012). The states are ``square_avg`` and ``acc_delta``."""
    grad = _decayed(param, grad, n)
    square_avg = n.rho * states[0] + (1 - n.rho) * grad * grad
    delta = ((states[1] + n.eps) / (square_avg + n.eps)).sqrt() * grad
    return param - n.lr * delta, square_avg, n.rho * states[1] + (1 - n.rho) * delta * delta


def _moments(
    param: Tensor, grad: Tensor, states: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply weight decay and update both moments, as Adam does."""
    if n.decoupled:
        grad, param = -grad if n.maximize else grad, param * (1 - n.lr * n.weight_decay)
    else:
        grad = _decayed(param, grad, n)
    exp_avg = states[0] + (1 - n.beta1) * (grad - states[0])
    return param, grad, exp_avg, n.beta2 * states[1] + (1 - n.beta2) * grad * grad


def _mu(step: Tensor, n: SimpleNamespace) -> Tensor:
    mu: Tensor = n.beta1 * (1 - 0.5 * 0.96 ** (step * n.momentum_decay))
    return mu


def _next_mu_product(mu_product: Tensor, step: Tensor, n: SimpleNamespace) -> Tensor:
    return (mu_product * _mu(step, n).float()).float().to(step.dtype)


def _nadam(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of NAdam (Dozat, 2016). The second counter is ``mu_product``, as in torch."""
    step, mu_product = counters
    param, grad, exp_avg, exp_avg_sq = _moments(param, grad, states, n)
    denominator = exp_avg_sq.sqrt() / (1 - n.beta2**step).sqrt() + n.eps
    now, later = _mu(step, n), _mu(step + 1, n)
    param = param - n.lr * (1 - now) / (1 - mu_product) * grad / denominator
    param = param - n.lr * later / (1 - mu_product * later) * exp_avg / denominator
    return param, exp_avg, exp_avg_sq


def _radam(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of RAdam (Liu et al., 2020). Until ``rho`` exceeds 5, the second moment is not used."""
    (step,) = counters
    param, grad, exp_avg, exp_avg_sq = _moments(param, grad, states, n)
    power, most = n.beta2**step, 2 / (1 - n.beta2) - 1
    rho = most - 2 * step * power / (1 - power)
    squared = (rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)
    adaptive = squared.clamp(min=0).sqrt() * (1 - power).sqrt() / (exp_avg_sq.sqrt() + n.eps)
    factor = torch.where(rho > 5, adaptive, torch.ones_like(adaptive))
    return param - n.lr / (1 - n.beta1**step) * exp_avg * factor, exp_avg, exp_avg_sq


def _adamax(
    param: Tensor, grad: Tensor, states: list[Tensor], counters: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of Adamax (Kingma and Ba, 2015). The states are ``exp_avg`` and ``exp_inf``."""
    grad = _decayed(param, grad, n)
    exp_avg = states[0] + (1 - n.beta1) * (grad - states[0])
    exp_inf = torch.maximum(n.beta2 * states[1], grad.abs() + n.eps)
    return param - n.lr / (1 - n.beta1 ** counters[0]) * exp_avg / exp_inf, exp_avg, exp_inf


def _schedule_free(
    param: Tensor, grad: Tensor, states: list[Tensor], _: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute a step of schedule-free AdamW (Defazio et al., 2024).

    The parameter is the sequence y of the paper, and the second state is z. The learning rate ``lr`` already
    includes warm-up.
    """
    exp_avg_sq = n.beta2 * states[0] + (1 - n.beta2) * grad * grad
    direction = grad / ((exp_avg_sq / n.correction2).sqrt() + n.eps) + n.weight_decay * param
    param = param + n.share * (states[1] - param) + n.y_step * direction
    return param, exp_avg_sq, states[1] - n.lr * direction


def _muon_momentum(
    _: Tensor, grad: Tensor, states: list[Tensor], __: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Return the matrix that Muon (Jordan, 2024) will orthogonalize, and the new momentum buffer.

    The new parameter is computed from the orthogonalized matrix later.
    """
    buffer = states[0] + (1 - n.momentum) * (grad - states[0])
    return grad + n.momentum * (buffer - grad) if n.nesterov else buffer, buffer


def _muon_update(
    param: Tensor, update: Tensor, _: list[Tensor], __: list[Tensor], n: SimpleNamespace
) -> tuple[Tensor, ...]:
    """Compute Muon's new parameter from ``update``, which is the orthogonalized matrix."""
    return ((1 - n.lr * n.weight_decay) * param - n.lr * n.ratio * update,)


_ADAM: Final = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
_SGD: Final = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
_MOMENTS: Final = ("signed", "square")
_RMSPROP: Final = ("lr", "alpha", "eps", "weight_decay", "maximize", "momentum")

RULES: Final = {
    "adam": Rule(numbers=_ADAM, states=_MOMENTS, apply=_adam, counters=1),
    "adam_amsgrad": Rule(numbers=_ADAM, states=(*_MOMENTS, "second square"), apply=_adam, counters=1),
    "sgd": Rule(numbers=_SGD, apply=_sgd),
    "sgd_momentum": Rule(numbers=_SGD, states=("signed",), apply=_sgd),
    "lion": Rule(
        numbers=("lr", "beta1", "beta2", "weight_decay", "maximize"), states=("signed",), apply=_lion
    ),
    "rmsprop": Rule(numbers=_RMSPROP, states=("square",), apply=_not_centered, counters=1),
    "rmsprop_momentum": Rule(numbers=_RMSPROP, states=("square", "signed"), apply=_not_centered, counters=1),
    "rmsprop_centered": Rule(numbers=_RMSPROP, states=("square", "signed"), apply=_centered, counters=1),
    "rmsprop_centered_momentum": Rule(
        numbers=_RMSPROP, states=("square", "signed", "signed"), apply=_centered, counters=1
    ),
    "adagrad": Rule(
        numbers=("lr", "lr_decay", "eps", "weight_decay", "maximize"),
        states=("square",),
        apply=_adagrad,
        counters=1,
    ),
    "adadelta": Rule(
        numbers=("lr", "rho", "eps", "weight_decay", "maximize"),
        states=("square", "square"),
        apply=_adadelta,
        counters=1,
    ),
    "nadam": Rule(
        numbers=(*_ADAM, "momentum_decay"), states=_MOMENTS, apply=_nadam, counters=2, count=_next_mu_product
    ),
    "radam": Rule(numbers=_ADAM, states=_MOMENTS, apply=_radam, counters=1),
    "adamax": Rule(
        numbers=("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
        states=_MOMENTS,
        apply=_adamax,
        counters=1,
    ),
    "schedule_free": Rule(
        numbers=("lr", "beta2", "eps", "weight_decay", "correction2", "share", "y_step", "step"),
        states=("square", "weight"),
        apply=_schedule_free,
    ),
    "muon_momentum": Rule(numbers=("lr", "momentum", "nesterov"), states=("signed",), apply=_muon_momentum),
    "muon_update": Rule(numbers=("lr", "weight_decay", "ratio"), apply=_muon_update),
}
"""Maps names to the rules of :func:`step_`. ``csrc/rules`` has the same rules in C++ and CUDA."""

# The ``state`` argument of draws() for each kind of state. Each value selects different random bits.
_DRAWS: Final = {"square": 1, "second square": 2}


@torch.no_grad()
def step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    counters: Sequence[Tensor],
    remainders: Sequence[Tensor],
    rule: str,
    numbers: Sequence[float],
    *,
    lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Divide the gradients by ``grad_scale``, and take an optimizer step unless ``found_inf`` is above 0.

    Args:
        params: The parameters, in float32, or in bfloat16 if ``remainders`` are given. They are written.
        grads: The gradients of the parameters, in float32, bfloat16 or float16. Each gradient is divided by
            ``grad_scale`` and rounded once to its dtype. ``maximize`` and weight decay do not change the
            stored gradient. The step itself uses the unrounded float32 quotients. If
            ``grad_scale`` is None or 1, gradients are not written and their version counters do not change.
            On a GPU the host cannot see that ``grad_scale`` is 1, so the version counters change even then.
        states: The first state of every parameter, then the second state of every parameter, and so on. Each
            state is float32 or bfloat16 in the shape of its parameter, or 8-bit codes (see
            :mod:`.state_codes`). States are written.
        counters: The step count of every parameter (one element, float32 or float64). If the rule has a
            second counter, the list continues with the second counter of every parameter (float32). Counters
            are written.
        remainders: The int16 tensors that together with the bfloat16 parameters give float32 weights, or an
            empty list. Remainders are written.
        rule: A key of :data:`RULES`.
        numbers: The values of the rule's hyperparameters, in the order of :attr:`Rule.numbers`.
        lr: A learning rate on the device (one element), which replaces the first element of ``numbers``.
        grad_scale: The divisor of the gradients (one element), which is the loss scale or the loss scale
            combined with a clip factor.
        found_inf: A tensor of one element. If ``found_inf`` is above 0, only the gradients are written.
    """
    entry, count = RULES[rule], len(params)
    named = SimpleNamespace(**dict(zip(entry.numbers, numbers, strict=True)))
    if lr is not None:
        named.lr = in_widest_float(lr).reshape(())
    taken = True if found_inf is None else found_inf.reshape(()) <= 0
    for i, (whole, grad) in enumerate(_unscaled(params, grads, remainders, grad_scale)):
        counts = [in_widest_float(counters[k * count + i]) for k in range(entry.counters)]
        if counts:
            counts[0] = counts[0] + 1
        if entry.count is not None:
            counts[1] = entry.count(counts[1], counts[0], named)
        stored = [states[k * count + i] for k in range(len(entry.states))]
        values = [
            _read_state(state, params[i], kind) for state, kind in zip(stored, entry.states, strict=True)
        ]
        stepped, *values = entry.apply(whole, grad, values, counts, named)
        step = counts[0] if counts else getattr(named, "step", 0.0)
        for state, value, kind in zip(stored, values, entry.states, strict=True):
            _write_state(state, value, params[i], taken, kind, step)
        for k, value in enumerate(counts):
            _write_if(counters[k * count + i], value, taken)
        _write_param(params[i], remainders[i] if remainders else None, stepped, taken)


def _unscaled(
    params: Sequence[Tensor], grads: Sequence[Tensor], remainders: Sequence[Tensor], grad_scale: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the gradients. Yield each parameter and its gradient in float32 or wider."""
    divides = grad_scale is not None and not (grad_scale.is_cpu and grad_scale.float().item() == 1)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        whole = param
        if remainders:
            whole = torch.empty_like(param, dtype=torch.float32)
            unpack_weights_([param], [remainders[i]], [whole])
        unscaled = in_widest_float(grad)
        if grad_scale is not None and divides:
            unscaled = unscaled / in_widest_float(grad_scale).reshape(())
            grad.copy_(unscaled)
        yield in_widest_float(whole), unscaled


def _write_if(tensor: Tensor, value: Tensor, taken: Tensor | bool) -> None:
    tensor.copy_(torch.where(torch.as_tensor(taken, device=tensor.device), value.to(tensor.dtype), tensor))


def _read_state(state: Tensor, param: Tensor, kind: str) -> Tensor:
    """Return a state in float32 or wider, decoded from the format in which it is stored."""
    if state.dtype is not torch.uint8:
        return in_widest_float(state)
    value = torch.empty_like(param, dtype=torch.float32)
    in_memory_order(value).copy_(decode(state, param.numel(), signed=kind == "signed"))
    return in_widest_float(value)


def _write_state(
    state: Tensor, value: Tensor, param: Tensor, taken: Tensor | bool, kind: str, step: Tensor | float
) -> None:
    """Write a state in the format in which it is stored. This reverses ``_read_state``."""
    if state.dtype is torch.float32:
        return _write_if(state, value, taken)
    flat = in_memory_order(torch.empty_like(param, dtype=torch.float32).copy_(value))
    drawn = draws(flat.numel(), step, _DRAWS[kind], flat.device) if kind in _DRAWS else None
    if state.dtype is torch.uint8:
        return _write_if(state, encode(flat, signed=kind == "signed", drawn=drawn), taken)
    rounded = torch.empty_like(param, dtype=torch.bfloat16)
    in_memory_order(rounded).copy_(to_bf16(flat, drawn))
    return _write_if(state, rounded, taken)


def _write_param(param: Tensor, remainder: Tensor | None, value: Tensor, taken: Tensor | bool) -> None:
    if remainder is None:
        return _write_if(param, value, taken)
    high, low = torch.empty_like(param), torch.empty_like(remainder)
    pack_weights_([value.to(torch.float32)], [high], [low])
    _write_if(param, high, taken)
    return _write_if(remainder, low, taken)
