"""What tensors hold: ranges, numbers that are not finite, and facts kept while a storage lives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from amp_plugin.precision import short_name

Value = TypeVar("Value")

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that hold their numbers themselves."""

_SWEEP = 4096  # entries, after which those of dead storages are dropped
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


def real_values(tensor: Tensor) -> Tensor | None:  # noqa: PLR0911 - one answer per layout
    """Return a tensor's stored numbers as real ones, without a copy where that can be.

    Returns:
        None if they cannot be read here: no floating-point or complex numbers, a tensor subclass, a
        fake or meta tensor, no storage.
    """
    if type(tensor) not in PLAIN or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.is_nested:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return real_values(whole.set_(tensor.untyped_storage()))
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
    """Return whether all elements are finite; one read, one host sync. True where they cannot be read."""
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
            first = () if tensor.is_nested else tuple(index[: tensor.dim()])
    return TensorSummary(
        name=name,
        dtype=tensor.dtype,
        shape=() if tensor.is_nested else tuple(tensor.shape),
        lowest=lowest,
        highest=highest,
        nan=nan,
        inf=inf,
        first=first,
    )


@contextmanager
def unwatched() -> Iterator[None]:
    """Run ops below every dispatch mode, tensor subclass and autocast region, without gradients."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def is_low_precision(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer bits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse tensors, subclasses, lazy parameters
        return 0


class Storages(Generic[Value]):
    """A value for each storage, so for a tensor, its views and what autograd saves of it.

    An entry holds the storage weakly: its memory is freed, but its address not used again until
    the entry is gone.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Value]] = {}
        self._sweep_at = _SWEEP

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor's storage; None if it has none."""
        address = storage_address(tensor) if self._entries else 0
        entry = self._entries.get(address)
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: Value) -> None:
        """Remember a value for a tensor's storage."""
        address = storage_address(tensor)
        if address:
            self._entries[address] = (StorageWeakRef(tensor.untyped_storage()), value)  # type: ignore[no-untyped-call]
            if len(self._entries) > self._sweep_at:
                self._drop_dead()

    def forget(self, tensor: Tensor) -> None:
        """Forget a storage that the tensor covers; of a part of one nothing is forgotten."""
        if self._entries and (address := storage_address(tensor)) in self._entries:
            storage = tensor.untyped_storage()
            if tensor.numel() * tensor.element_size() >= storage.nbytes():
                del self._entries[address]

    def alive(self) -> list[Value]:
        """Return the values of the storages that live, oldest first."""
        self._drop_dead()
        return [value for _, value in self._entries.values()]

    def _drop_dead(self) -> None:
        self._entries = {
            address: entry
            for address, entry in self._entries.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        self._sweep_at = max(_SWEEP, 2 * len(self._entries))
