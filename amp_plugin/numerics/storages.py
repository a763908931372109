"""Remember something about storages for as long as they live."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Value = TypeVar("Value")

_SWEEP = 4096  # entries, after which those of dead storages are dropped


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, subclasses
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
