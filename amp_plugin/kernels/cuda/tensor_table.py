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
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_plugin.kernels.cuda.description import DTYPE_CODES, UNKNOWN_DTYPE, device_number

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

    def of(self, described: NDArray[Any], *, cast: bool = False, keep: bool = True) -> TensorTable:
        """Return the table of described tensors.

        Args:
            described: `DESCRIPTION` records of dense tensors.
            cast: Whether outputs are described too.
            keep: False if the table may not outlive the call, as in a graph capture.

        Raises:
            ValueError: A tensor is on another device or not aligned to its element size.
            TypeError: A tensor has another dtype than `DTYPE_CODES` has.
        """
        key = (self._uploader.stream(), cast, described.tobytes())
        with self._lock:
            if keep and (table := self._tables.get(key)):
                self._tables.move_to_end(key)
                return table
        _require_supported(described, self._uploader.device)
        rows, blocks, chunk = layout(described, self._uploader.multiprocessors, cast=cast)
        uploaded = self._uploader.upload(rows) if blocks else None
        table = TensorTable(rows=uploaded, count=len(rows), blocks=blocks, chunk=chunk)
        if keep:
            with self._lock:
                self._tables[key] = table
                while len(self._tables) > _KEPT_TABLES:
                    self._tables.popitem(last=False)
        return table


def layout(
    described: NDArray[Any], multiprocessors: int, *, cast: bool = False
) -> tuple[NDArray[Any], int, int]:
    """Cut tensors into chunks.

    Chunks are as large as 32 KiB, as long as that gives every multiprocessor 4 blocks or more, and
    larger where it would give more than 64. For a cast the chunk is counted in elements, a quarter
    of that.

    Args:
        described: `DESCRIPTION` records.
        multiprocessors: Of the device.
        cast: Whether the chunk is counted in elements.

    Returns:
        The rows, the number of blocks and the size of a chunk.
    """
    rows = np.zeros(len(described), dtype=ROW)
    for field in ("address", "out_address", "numel", "dtype", "out_dtype"):
        rows[field] = described[field]
    extents = rows["numel"].copy()
    if not cast:  # chunks begin at multiples of 16 bytes of the address
        extents = extents * _SIZES[rows["dtype"]] + rows["address"] % np.uint64(16)
        extents[rows["numel"] == 0] = 0
    unit = 4 if cast else 1
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


def _require_supported(described: NDArray[Any], device: torch.device) -> None:
    elsewhere = np.flatnonzero(described["device"] != device_number(device))
    if len(elsewhere):
        which = f"tensor {elsewhere[0]} of {len(described)}"
        msg = f"{which} is not on {device}, where the scale is; call the op once for each device"
        raise ValueError(msg)
    unknown = np.flatnonzero(described["dtype"] == UNKNOWN_DTYPE)
    if len(unknown):
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        msg = f"tensor {unknown[0]} of {len(described)}: the CUDA kernels take {allowed}; convert it"
        raise TypeError(msg)
    for address, dtype in (("address", "dtype"), ("out_address", "out_dtype")):
        off = np.flatnonzero((described[address] % _SIZES[described[dtype]] != 0) & (described["numel"] > 0))
        if len(off):
            size = _SIZES[described[dtype][off[0]]]
            msg = (
                f"tensor {off[0]} of {len(described)} begins at address {described[address][off[0]]:#x}, "
                f"no multiple of its element size of {size} bytes; pass tensor.clone()"
            )
            raise ValueError(msg)
