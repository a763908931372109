"""Summarise tensors by their ranges, infs, nans and fingerprints, and map storages to values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from amp_plugin.hardware import in_widest_float, widest_float
from amp_plugin.precision import short_name

Value = TypeVar("Value")

Held = tuple[str, ...]
"""The non-finite values in a tensor, out of ``"nan"``, ``"inf"`` and ``"-inf"``, in this order."""

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that own their memory. Other subclasses of Tensor wrap such tensors."""

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_BUCKETS = 128  # the number of buckets of a fingerprint
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SWEEP = 4096  # each time this many entries have been added, the entries of freed storages are dropped
_NARROW = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_")))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """A few numbers that describe a tensor."""

    name: str = ""  # the name of the argument or, if known, the path of the weight; empty for a result
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    lowest: float = math.nan  # the smallest finite element; nan if no element is finite
    highest: float = math.nan  # the largest finite element
    nan: int = 0  # the number of elements that are nan
    inf: int = 0  # the number of elements that are infinite
    # The index of the first non-finite element. Empty if all elements are finite or the tensor is 0-dim.
    first: tuple[int, ...] = ()

    @property
    def largest(self) -> float:
        """The largest magnitude of the finite elements, or nan if no element is finite."""
        return max(abs(self.lowest), abs(self.highest))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        size = f"{self.name} {short_name(self.dtype)}[{shape}]".strip()
        held = "no finite element" if math.isnan(self.lowest) else f"{self.lowest:.5g} to {self.highest:.5g}"
        counts = [f"{count} {name}" for name, count in (("nan", self.nan), ("inf", self.inf)) if count]
        return ", ".join([f"{size} {held}", *counts])


def _stored(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the values, which is ``values()`` for a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def real_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor as a real (not complex) tensor, without a copy if possible.

    Return None if they cannot be read.
    """
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if type(tensor) not in PLAIN or tensor.is_meta or not is_number or tensor._is_zerotensor():
        return None
    if tensor.is_nested:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return real_values(whole.set_(tensor.untyped_storage()))
    if tensor.layout is not torch.strided:
        stored = _stored(tensor)
        return None if stored is tensor else real_values(stored)
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor.detach().float() if tensor.dtype in _NARROW else tensor.detach()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, with one read and one host sync.

    If the tensor's values cannot be read, return True.
    """
    values = real_values(tensor)
    if values is None or values.numel() == 0:
        return True
    bounds = torch.stack(torch.aminmax(values))  # if an element is nan, both are nan
    return all(map(math.isfinite, bounds.tolist()))


def non_finite(tensor: Tensor, where: Tensor | None = None) -> Held:
    """Return which non-finite values are in a tensor, or in the elements that ``where`` selects."""
    values = None if is_finite(tensor) else real_values(tensor)
    if values is None:
        return ()
    values = values if where is None else values[where]
    found = {"nan": values.isnan(), "inf": values == math.inf, "-inf": values == -math.inf}
    return tuple(name for name, elements in found.items() if bool(elements.any()))


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm of a tensor, computed in fp64. If its values cannot be read, return 0."""
    with unwatched():
        values = real_values(tensor)
        return (
            0.0
            if values is None
            else float(torch.linalg.vector_norm(values, dtype=widest_float(values.device)))
        )


def distance(value: Tensor, exact: Tensor, order: float = 2.0) -> float:
    """Return the norm of ``value - exact``, divided by the norm of ``exact``.

    The result is inf if an element is finite in only one of the two tensors.
    """
    value, exact = in_widest_float(value.detach()), in_widest_float(exact.detach())
    alike = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(alike, 0.0, value - exact)
    size = torch.where(exact.isfinite(), exact, 0.0)
    scale = torch.linalg.vector_norm(size, order).clamp_min(torch.finfo(torch.float32).tiny)
    return float(torch.linalg.vector_norm(difference, order).nan_to_num(torch.inf, posinf=torch.inf) / scale)


def summarise(tensor: Tensor, name: str = "") -> TensorSummary:
    """Return a summary of a tensor. Real and imaginary parts of complex numbers count as elements."""
    shape = () if tensor.is_nested else tuple(tensor.shape)
    values = real_values(tensor)
    known: dict[str, Any] = {"name": name, "dtype": tensor.dtype, "shape": shape}
    if values is None or not values.numel():
        return TensorSummary(**known)
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()  # if an element is nan, both are nan
    if math.isfinite(lowest) and math.isfinite(highest):
        return TensorSummary(**known, lowest=lowest, highest=highest)
    finite = values.isfinite()
    lowest, highest = torch.aminmax(values[finite]) if bool(finite.any()) else (math.nan, math.nan)
    odd = (~finite).nonzero()[:1].tolist()
    return TensorSummary(
        **known,
        lowest=float(lowest),
        highest=float(highest),
        nan=int(values.isnan().sum()),
        inf=int(values.isinf().sum()),
        first=tuple(odd[0][: len(shape)]) if odd else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A few numbers that represent a tensor in a comparison. Every element affects each of these numbers."""

    checksum: int  # a checksum of all bits and their positions; equal tensors have equal checksums
    norm: float  # the Euclidean norm of the finite elements
    unfinite: int  # the number of elements that are not finite
    # A count sketch: each element is added, with a pseudo-random sign, to a pseudo-random bucket.
    # The distance between two sketches equals the distance between their tensors to within about 10 %.
    sketch: Sequence[float]
    is_discrete: bool = False  # whether the tensor holds integers or booleans
    made_by: int = -1  # the index of the recorded op that made the tensor; -1 if no recorded op made it

    def difference(self, other: Fingerprint) -> float:
        """Return the relative difference from a tensor of the same shape.

        The difference is inf if the tensors have different numbers of non-finite elements.
        """
        if self.unfinite != other.unfinite:
            return math.inf
        apart = math.dist(self.sketch, other.sketch)
        # Different checksums of integers mean that at least one element differs.
        element = 2.0 if self.is_discrete and self.checksum != other.checksum else 0.0
        apart = max(apart, abs(self.norm - other.norm), element)
        return 0.0 if apart == 0 else apart / other.norm if other.norm else math.inf


def fingerprint(tensor: Tensor, made_by: int = -1) -> Fingerprint:
    """Return the fingerprint of a dense tensor.

    Integers and booleans are compared by hash. Two integers are therefore either equal or different, no
    matter how far apart they are.
    """
    is_discrete = not (tensor.is_floating_point() or tensor.is_complex())
    flat = (tensor.detach() if is_discrete else real_values(tensor)).contiguous().reshape(-1)  # type: ignore[union-attr]
    places = torch.arange(flat.numel(), device=flat.device)
    bits = flat.long() if is_discrete else flat.view(_BITS[flat.element_size()]).long()
    if is_discrete:
        flat = (_mixed(bits * 2654435761 + places) / 2.0**30 - 1) * math.sqrt(3)
    flat = in_widest_float(flat)
    finite = flat.isfinite()
    flat = torch.where(finite, flat, 0.0)
    return Fingerprint(
        checksum=int((bits * (2 * places + 1)).sum()),
        norm=float(torch.linalg.vector_norm(flat)),
        unfinite=int((~finite).sum()),
        sketch=tuple(sketch_of(flat, places).tolist()),
        is_discrete=is_discrete,
        made_by=made_by,
    )


def sketch_of(flat: Tensor, places: Tensor, buckets: int = _BUCKETS) -> Tensor:
    """Return a count sketch, which depends linearly on the elements.

    Each element is added, with a pseudo-random sign, to a pseudo-random bucket.

    Args:
        flat: The elements, of shape ``[numel]``.
        places: The index of each element in the tensor, int64 of shape ``[numel]``. The index determines the
            bucket and the sign.
        buckets: The number of buckets.
    """
    hashed = _mixed(places)
    sketch = torch.zeros(buckets, dtype=flat.dtype, device=flat.device)
    return sketch.index_add_(0, hashed % buckets, flat * ((hashed >> 20 & 1) * 2 - 1))


def _mixed(numbers: Tensor) -> Tensor:
    """Hash each number to a pseudo-random integer below 2^31."""
    mixed = (numbers * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0x7FFFFFFF
    return mixed ^ (mixed >> 13)


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the ops in a block from dispatch modes, tensor subclasses, autocast and autograd."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def is_low_precision(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype has fewer bits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def as_json(value: Any) -> Any:
    """Return a value that JSON can hold.

    Dataclasses become dicts, tuples become lists, and dtypes, nan and inf become strings.
    """
    if is_dataclass(value):
        return {entry.name: as_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {name: as_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def storage_address(tensor: Tensor) -> int:
    """Return the address of the storage that holds a tensor's values, or 0 if there is none."""
    try:
        return int(_stored(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # tensor subclasses and lazy parameters
        return 0


class Storages(Generic[Value]):
    """A mapping from the storages of tensors to values. A tensor and its views share an entry.

    The mapping holds weak references to storages. The memory of a storage can be freed, but its address is
    not reused while the entry exists.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Value]] = {}

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value stored for a tensor's storage, or None if there is none."""
        address = storage_address(tensor) if self._entries else 0
        entry = self._entries.get(address)
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: Value) -> None:
        """Store a value for a tensor's storage."""
        address = storage_address(tensor)
        if address:
            held = StorageWeakRef(_stored(tensor).untyped_storage())  # type: ignore[no-untyped-call]
            self._entries[address] = (held, value)
            if len(self._entries) % _SWEEP == 0:
                self.alive()

    def forget(self, tensor: Tensor) -> None:
        """Remove the entry for a tensor's storage, but only if the tensor covers the whole storage."""
        if self._entries and (address := storage_address(tensor)) in self._entries:
            stored = _stored(tensor)
            if stored.numel() * stored.element_size() >= stored.untyped_storage().nbytes():
                del self._entries[address]

    def discard(self, tensor: Tensor) -> None:
        """Remove the entry for a tensor's storage, even if the tensor covers only a part of it."""
        self._entries.pop(storage_address(tensor), None)

    def alive(self) -> list[Value]:
        """Drop the entries of freed storages, and return the remaining values, oldest first."""
        self._entries = {
            address: entry
            for address, entry in self._entries.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        return [value for _, value in self._entries.values()]


class ShadowValues(Storages[Tensor]):
    """Keeps a copy of each storage in a wider dtype. The copy is called a shadow.

    The wide copy of a storage is a flat tensor. All views of a storage share one wide copy.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def follows(self, tensor: Tensor) -> bool:
        """Return whether a copy in the wider dtype (a shadow) can be kept for a tensor.

        The tensor must be dense, and its dtype must not be wider than that of its copy.
        """
        return (
            type(tensor) in PLAIN  # other tensor types wrap a plain tensor or have no memory of their own
            and tensor.layout is torch.strided
            and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
            and not (tensor.is_neg() or tensor._is_zerotensor())
            and tensor.element_size() <= self.wide(tensor.dtype).itemsize
            and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        )

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which a tensor of this dtype is widened. Integers keep their dtype."""
        if dtype.is_complex:
            return self.dtype.to_complex()
        return self.dtype if dtype.is_floating_point else dtype

    def plain(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        """Convert a tensor's values to the wide dtype.

        If no wide copy can be kept for the tensor, the dtype does not change.
        """
        return tensor.to(self.wide(tensor.dtype) if self.follows(tensor) else tensor.dtype, copy=copy)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shadow of a tensor, in the tensor's shape.

        If the tensor has no shadow, make one that starts with the tensor's own values.
        """
        flat = self.get(tensor)
        storage, dtype = tensor.untyped_storage(), self.wide(tensor.dtype)
        if flat is None or flat.dtype != dtype or flat.numel() != storage.nbytes() // tensor.element_size():
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            flat = whole.to(dtype, copy=True)
            self.set(tensor, flat)
        view = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return view.conj() if tensor.is_conj() else view
