"""A tensor in a few dozen numbers, enough to tell that and by how much another differs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_plugin.numerics.tensor_summary import real_values

SAMPLES = 32  # elements kept of each tensor, evenly spread

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A tensor in a few numbers.

    Attributes:
        checksum: of all bits and their places; equal tensors of one dtype have equal ones.
        norm: Euclidean, of the finite elements.
        largest: the largest magnitude of them.
        unfinite: how many elements are not finite.
        samples: ``SAMPLES`` elements at most, evenly spread over the tensor.
    """

    checksum: int
    norm: float
    largest: float
    unfinite: int
    samples: tuple[float, ...]

    def difference(self, other: Fingerprint) -> float:
        """Return the relative difference of two tensors of one shape, as far as the numbers here tell.

        The largest of: norm of the samples' difference by the samples' norm, difference of norms by the norm,
        difference of the largest magnitudes. inf where one has other elements that are not finite.
        """
        if self.unfinite != other.unfinite:
            return math.inf
        pairs = list(zip(self.samples, other.samples, strict=True))
        finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        sampled = _relative(math.hypot(*(a - b for a, b in finite)), math.hypot(*(b for _, b in finite)))
        norms = _relative(abs(self.norm - other.norm), other.norm)
        return max(sampled, norms, _relative(abs(self.largest - other.largest), other.largest))


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return a tensor in a few numbers.

    Args:
        tensor: dense, floating-point or complex, on any device; one read, some host syncs.

    Raises:
        ValueError: its numbers cannot be read.
    """
    values = real_values(tensor)
    if values is None:
        msg = f"fingerprint: the numbers of a {type(tensor).__name__} of {tensor.dtype} cannot be read"
        raise ValueError(msg)
    flat = values.contiguous().reshape(-1)
    if not flat.numel():
        return Fingerprint(checksum=0, norm=0.0, largest=0.0, unfinite=0, samples=())
    bits = flat.view(_BITS[flat.element_size()]).long()
    weights = 2 * torch.arange(flat.numel(), device=flat.device) + 1
    finite = flat[flat.isfinite()].double()
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
    return Fingerprint(
        checksum=int((bits * weights).sum()),
        norm=float(torch.linalg.vector_norm(finite)),
        largest=float(finite.abs().max()) if finite.numel() else 0.0,
        unfinite=flat.numel() - finite.numel(),
        samples=tuple(flat[places.to(flat.device)].double().tolist()),
    )


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf
