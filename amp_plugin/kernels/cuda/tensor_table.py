"""The table of tensors that a launch works on: rows on the device, and its cut into blocks.

A table is immutable once it is on the device. It is looked up by what it was made from (the
stream, the addresses, the sizes, the dtypes), so an optimizer whose gradients did not move
uploads nothing, whatever other optimizers, streams and threads do meanwhile. As a table
belongs to the stream it was made on, torch's allocator reuses its memory, and that of the
pinned rows, only when the kernels that read them have run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW: Final = np.dtype(
    [
        ("address", np.uint64),
        ("out_address", np.uint64),
        ("numel", np.uint64),
        ("first_block", np.uint32),
        ("dtype", np.uint8),
        ("out_dtype", np.uint8),
        ("unused", np.uint16),
    ]
)
ROWS_BY_VALUE: Final = 120  # kRowsByValue in write_table.cu
DTYPE_CODES: Final = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
_SIZES: Final = np.array([2, 2, 4, 8, 8, 16], dtype=np.uint64)

FIRST_CHUNK: Final = 32 * 1024
SMALLEST_CHUNK: Final = 4 * 1024
_BLOCKS_PER_MULTIPROCESSOR: Final = (4, 64)
_KEPT_TABLES: Final = 64  # per device


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTable:
    """Rows on the device.

    Attributes:
        rows: uint8 ``[32 * count]`` on the device; None if there is no block.
        count: Number of rows, one per tensor.
        blocks: Number of blocks to launch, one per chunk; 0 if all tensors are empty.
        chunk: Size of a chunk, a power of two: bytes, or elements for a cast.
    """

    rows: Tensor | None
    count: int
    blocks: int
    chunk: int


class Uploader(Protocol):
    """Where tables go: a device seen from the current stream."""

    device: torch.device
    multiprocessors: int

    def stream(self) -> int:
        """Return a number that stands for the current stream."""

    def upload(self, rows: NDArray[Any]) -> Tensor:
        """Return a uint8 tensor on the device with these rows, without a host sync."""


class TableCache:
    """The tables of one device, by what they were made from."""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._tables: OrderedDict[tuple[object, ...], TensorTable] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tensors: Sequence[Tensor], out: Sequence[Tensor] = (), *, keep: bool = True) -> TensorTable:
        """Return the table of these tensors.

        Args:
            tensors: Dense tensors on the device.
            out: For a cast, as many tensors of the same sizes.
            keep: False if the table may not outlive the call, as in a graph capture.

        Raises:
            ValueError: A tensor is on another device or not aligned to its element size.
            TypeError: A tensor has another dtype than `DTYPE_CODES` has.
        """
        every = [*tensors, *out]
        key = (
            self._uploader.stream(),
            len(out),
            tuple([t.data_ptr() for t in every]),
            tuple([t.numel() for t in tensors]),
            tuple([t.dtype for t in every]),
        )
        with self._lock:
            if keep and (table := self._tables.get(key)):
                self._tables.move_to_end(key)
                return table
        table = self._make(tensors, out)
        if keep:
            with self._lock:
                self._tables[key] = table
                while len(self._tables) > _KEPT_TABLES:
                    self._tables.popitem(last=False)
        return table

    def _make(self, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> TensorTable:
        for tensor in (*tensors, *out):
            _require_supported(tensor, self._uploader.device)
        rows, blocks, chunk = layout(tensors, out, self._uploader.multiprocessors)
        uploaded = self._uploader.upload(rows) if blocks else None
        return TensorTable(rows=uploaded, count=len(rows), blocks=blocks, chunk=chunk)


def layout(
    tensors: Sequence[Tensor], out: Sequence[Tensor], multiprocessors: int
) -> tuple[NDArray[Any], int, int]:
    """Cut tensors into chunks.

    Chunks are as large as 32 KiB, as long as that gives every multiprocessor 4 blocks or more, and
    larger where it would give more than 64. With ``out`` the chunk is counted in elements, a
    quarter of that.

    Args:
        tensors: Dense tensors.
        out: Their outputs in a cast, else empty.
        multiprocessors: Of the device.

    Returns:
        The rows, the number of blocks and the size of a chunk.
    """
    rows = np.zeros(len(tensors), dtype=ROW)
    rows["address"] = [t.data_ptr() for t in tensors]
    rows["numel"] = [t.numel() for t in tensors]
    rows["dtype"] = [DTYPE_CODES[t.dtype] for t in tensors]
    if out:
        rows["out_address"] = [t.data_ptr() for t in out]
        rows["out_dtype"] = [DTYPE_CODES[t.dtype] for t in out]
        extents = rows["numel"].astype(np.uint64)
    else:  # chunks begin at multiples of 16 bytes of the address
        extents = rows["numel"] * _SIZES[rows["dtype"]] + rows["address"] % np.uint64(16)
        extents[rows["numel"] == 0] = 0
    unit = 4 if out else 1
    chunk, blocks_of = _choose_chunk(extents, multiprocessors, FIRST_CHUNK // unit, SMALLEST_CHUNK // unit)
    ends = np.cumsum(blocks_of, dtype=np.uint64)
    rows["first_block"] = ends - blocks_of
    return rows, int(ends[-1]) if len(ends) else 0, chunk


def _choose_chunk(
    extents: NDArray[Any], multiprocessors: int, first: int, smallest: int
) -> tuple[int, NDArray[Any]]:
    fewest, most = (multiprocessors * blocks for blocks in _BLOCKS_PER_MULTIPROCESSOR)

    def cut(chunk: int) -> NDArray[Any]:
        return (extents + np.uint64(chunk - 1)) // np.uint64(chunk)

    chunk = first
    while chunk > smallest and cut(chunk).sum() < fewest:
        chunk //= 2
    while cut(chunk).sum() > max(most, 2 * len(extents)):
        chunk *= 2
    return chunk, cut(chunk)


def _require_supported(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        msg = f"a tensor is on {tensor.device}, the scale on {device}; call the op once for each device"
        raise ValueError(msg)
    if tensor.dtype not in DTYPE_CODES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        msg = f"a tensor has dtype {tensor.dtype}; the CUDA kernels take {allowed}: convert it"
        raise TypeError(msg)
    if tensor.numel() and tensor.data_ptr() % min(tensor.element_size(), 16):
        msg = (
            f"a tensor begins at address {tensor.data_ptr():#x}, no multiple of its element size of "
            f"{tensor.element_size()} bytes; pass tensor.clone()"
        )
        raise ValueError(msg)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill one run of memory, in whatever order, without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
