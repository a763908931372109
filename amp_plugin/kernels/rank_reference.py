"""What ranks tell each other of their gradients, in plain torch: the oracle of the tests and the fallback.

Norms cannot be added up over ranks, but their powers can. So these numbers travel, in float64::

    packed = [the sum of norm ** p, for each way of spreading gradients over ranks, ...,
              1 if a gradient is not finite, else 0]

One collective adds them up. For an infinite p it takes maxima: of the norms themselves, or of the negated
norms where p is -inf. Devices without float64 use float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def pack_measurements_(
    packed: Tensor,
    norms: Sequence[Tensor],
    found_infs: Sequence[Tensor],
    slots: Sequence[int],
    replicas: Sequence[int],
    norm_type: float,
) -> None:
    """Write what ranks are to add up, or take maxima of.

    Args:
        packed: float64 or float32, ``[len(replicas) + 1]``; written.
        norms: This rank's norms, float32 or float64, one element each; may be none.
        found_infs: This rank's overflow flags, float32 or float64, one element each; may be none.
        slots: For each norm the element of ``packed`` that it is part of.
        replicas: For each power the number of ranks that hold the same gradients and will all add theirs.
        norm_type: The p of the norms.

    Raises:
        ValueError: The numbers of norms, slots and elements do not go together.
    """
    _refuse_shapes(packed, norms, slots, replicas)
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
    """Read what ranks have added up.

    Args:
        packed: As :func:`pack_measurements_` and collectives left them; at least one. The last one's flag
            counts.
        norm_type: The p of the norms.

    Returns:
        The norm of all gradients of all ranks, and found_inf, exactly 0.0 or 1.0; float32, 0-dim.

    Raises:
        ValueError: ``packed`` is empty.
    """
    if not packed:
        msg = "unpack_measurements: got no packed measurements; give at least one"
        raise ValueError(msg)
    total = _join(torch.cat([values[:-1] for values in packed]), norm_type)
    if norm_type == -math.inf:
        total = -total
    norm = total if _has_no_power(norm_type) else total.pow(1.0 / norm_type)
    return norm.to(torch.float32), (packed[-1][-1] > 0).to(torch.float32)


def _refuse_shapes(
    packed: Tensor, norms: Sequence[Tensor], slots: Sequence[int], replicas: Sequence[int]
) -> None:
    fits = len(norms) == len(slots) and all(0 <= slot < len(replicas) for slot in slots)
    if not fits or packed.shape != (len(replicas) + 1,):
        count = len(replicas)
        msg = (
            f"pack_measurements_: got {len(norms)} norms, slots {list(slots)}, {count} replicas and packed "
            f"of shape {list(packed.shape)}; give one slot below {count} for each norm, and one element more "
            "than there are replicas"
        )
        raise ValueError(msg)


def _power(norms: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    """The sum of the norms' powers, 0-dim; what changes nothing if there are none."""
    if not norms:
        return like.new_full((), -math.inf if norm_type == -math.inf else 0.0)
    wide = torch.stack([norm.reshape(()).to(like.dtype) for norm in norms])
    if norm_type == -math.inf:
        wide = -wide
    return _join(wide if _has_no_power(norm_type) else wide.pow(norm_type), norm_type)


def _join(powers: Tensor, norm_type: float) -> Tensor:
    if powers.numel() == 0:
        return powers.new_full((), -math.inf if norm_type == -math.inf else 0.0)
    return powers.max() if math.isinf(norm_type) else powers.sum()


def _has_no_power(norm_type: float) -> bool:
    return norm_type == 0 or math.isinf(norm_type)
