"""What a tensor holds, in a few numbers: its range, and how many of its elements are nan or infinite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_plugin.precision import short_name

_NARROW = tuple(
    getattr(torch, name) for name in dir(torch) if name.startswith("float8_") or name == "float4_e2m1fn_x2"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """Which numbers that are not finite a tensor holds.

    Attributes:
        nan, posinf, neginf: whether there is one.
    """

    nan: bool = False
    posinf: bool = False
    neginf: bool = False

    @property
    def inf(self) -> bool:
        """Whether an infinity of either sign is there."""
        return self.posinf or self.neginf

    def __bool__(self) -> bool:
        return self.nan or self.inf

    def __str__(self) -> str:
        named = {"nan": self.nan, "inf": self.posinf, "-inf": self.neginf}
        return " and ".join(name for name, held in named.items() if held) or "finite"


FINITE = NonFinite()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """A tensor in a few numbers.

    Attributes:
        name: of the op's argument; a weight's path where it is known; empty for an output.
        dtype: its dtype.
        shape: its shape.
        lowest, highest: of its finite elements; nan if there is none.
        nan, inf: how many elements are nan, and infinite.
        first: index of the first element that is not finite; empty if all are, or it has no dimensions.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    lowest: float
    highest: float
    nan: int = 0
    inf: int = 0
    first: tuple[int, ...] = ()

    @property
    def largest(self) -> float:
        """The largest magnitude among the finite elements; nan if there is none."""
        return max(abs(self.lowest), abs(self.highest))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        size = f"{self.name} {short_name(self.dtype)}[{shape}]".strip()
        held = "no finite element" if math.isnan(self.lowest) else f"{self.lowest:.5g} to {self.highest:.5g}"
        counts = [f"{count} {name}" for name, count in (("nan", self.nan), ("inf", self.inf)) if count]
        return ", ".join([f"{size} {held}", *counts])


def real_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's stored numbers as real ones, without a copy where that can be.

    Returns:
        None if they cannot be read here: no floating-point or complex numbers, a tensor subclass, a
        fake or meta tensor, no storage.
    """
    if type(tensor) not in {Tensor, nn.Parameter, nn.Buffer} or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor._is_zerotensor():
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.layout is not torch.strided:
        values = _stored(tensor)
        return None if values is None else real_values(values)
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.detach().float() if tensor.dtype in _NARROW else tensor.detach()


def _stored(tensor: Tensor) -> Tensor | None:
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return tensor.values()
    return None


def is_finite(tensor: Tensor) -> bool:
    """Say whether all elements are finite; one read, one host sync. True where they cannot be read."""
    values = real_values(tensor)
    if values is None or values.numel() == 0:
        return True
    lowest, highest = torch.aminmax(values)  # nan comes through
    if values.is_cuda:
        return all(map(math.isfinite, torch.stack((lowest, highest)).tolist()))
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())


def non_finite(tensor: Tensor) -> NonFinite:
    """Return which numbers that are not finite a tensor holds; several reads where there are some."""
    if is_finite(tensor):
        return FINITE
    values = real_values(tensor)
    if values is None:
        return FINITE
    return NonFinite(
        nan=bool(values.isnan().any()),
        posinf=bool((values == math.inf).any()),
        neginf=bool((values == -math.inf).any()),
    )


def summarise(tensor: Tensor, name: str = "") -> TensorSummary:
    """Read a tensor and return it in a few numbers; of a complex one, real and imaginary parts.

    Args:
        tensor: of any shape and floating-point or complex dtype, on any device.
        name: what to call it.
    """
    values = real_values(tensor)
    lowest = highest = math.nan
    nan, inf, first = 0, 0, ()
    if values is not None and values.numel():
        finite = values.isfinite()
        if bool(finite.any()):
            kept = values[finite]
            lowest, highest = (bound.item() for bound in torch.aminmax(kept))
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        if nan or inf:
            index = (~finite).nonzero()[0].tolist()
            first = tuple(index[: tensor.dim()])
    return TensorSummary(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        lowest=lowest,
        highest=highest,
        nan=nan,
        inf=inf,
        first=first,
    )
