"""The ops of :mod:`amp_plugin.kernels.ops` on a device that runs the CUDA kernels.

No op waits for the device or reads from it. Launches: 2 for ``norm_check`` and ``unscale_``,
1 for the others (and one memset for ``multiply_``), whatever the number of tensors; during a
graph capture one more per 120 tensors, since a captured launch carries its table by value.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_plugin.kernels.cuda.catalogue import (
    CAST,
    CLIP_FACTOR,
    FINALISE,
    MULTIPLY,
    NORM_CHECK,
    UNSCALE,
    UPDATE_SCALE,
    Kernel,
)
from amp_plugin.kernels.cuda.description import ALIKE, DENSE, DTYPE_CODES, describe, increment_versions
from amp_plugin.kernels.cuda.tensor_table import TableCache, TensorTable, Uploader

PARTIAL_BYTES: Final = 16  # struct Partial in norms.cuh
_NORM_OF_P: Final = {2.0: "Squares", 1.0: "Magnitudes", math.inf: "Maximum", -math.inf: "Minimum"}
_LAST_CASTABLE: Final = DTYPE_CODES[torch.float64]  # complex dtypes come behind it


class DeviceScalar(ctypes.Structure):
    """A one-element tensor as the kernels take it; struct DeviceScalar in elements.cuh."""

    _fields_ = (("address", ctypes.c_void_p), ("is_double", ctypes.c_uint64))


class Launcher(Uploader, Protocol):
    """A device that runs kernels on its current stream."""

    def capturing(self) -> bool:
        """Return True while the current stream is being captured into a graph."""

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel with these ctypes objects as arguments; see ``CudaLauncher.launch``."""


class Operations:
    """The ops on one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._tables = TableCache(launcher)

    def norm_check(
        self, grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure gradients; see ``reference.norm_check``. B bytes read, 2 launches, no sync."""
        scalar = self._scalar(inv_scale, "inv_scale")
        norm = _NORM_OF_P.get(norm_type, "Power")
        dense, described = _dense(grads)
        table = self._table(described)
        partials = self._empty(table.blocks * PARTIAL_BYTES, torch.uint8)
        if table.blocks:
            arguments = (*_table_arguments(table), ctypes.c_double(norm_type), _pointer(partials))
            self._launcher.launch(NORM_CHECK[norm], table.blocks, arguments)
        del dense  # not before: its memory could have become that of the partial results
        return self._finalise(norm, norm_type, table, partials, scalar)

    def unscale_(
        self, grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply and measure gradients; see ``reference.unscale_``. 2B bytes, 2 launches, no sync."""
        scalar = self._scalar(inv_scale, "inv_scale")
        norm = _NORM_OF_P.get(norm_type, "Power")
        with _written(grads) as described:
            table = self._table(described)
            partials = self._empty(table.blocks * PARTIAL_BYTES, torch.uint8)
            if table.blocks:
                arguments = (*_table_arguments(table), ctypes.c_double(norm_type), scalar, _pointer(partials))
                self._launcher.launch(UNSCALE[norm], table.blocks, arguments)
        return self._finalise(norm, norm_type, table, partials, scalar)

    def multiply_(self, grads: Sequence[Tensor], factor: Tensor) -> Tensor:
        """Multiply gradients; see ``reference.multiply_``. 2B bytes, none if the factor is 1; no sync."""
        scalar = self._scalar(factor, "factor")
        found_inf = torch.zeros((), dtype=torch.float32, device=self._launcher.device)
        with _written(grads) as described:
            table = self._table(described)
            if table.blocks:
                arguments = (*_table_arguments(table), scalar, _pointer(found_inf))
                self._launcher.launch(MULTIPLY, table.blocks, arguments)
        return found_inf

    def cast(self, src: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Convert tensors into kept buffers; see ``reference.cast``. One launch, no sync.

        Pairs that are not floating, not dense or laid out differently are copied by torch, one by one.
        """
        if len(src) != len(out):
            msg = f"cast: {len(src)} tensors to copy and {len(out)} to write; give one output for each input"
            raise ValueError(msg)
        described = describe(src, out, writes=True)
        alike = _castable(described)
        table = self._table(described[alike], cast=True)
        if table.blocks:
            self._launcher.launch(CAST, table.blocks, _table_arguments(table))
        if not alike.all():
            with torch.no_grad():
                for one, other, fits in zip(src, out, alike, strict=True):
                    if not fits:
                        other.copy_(one)

    def update_scale_(
        self,
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
        """Adjust a loss scale; see ``reference.update_scale_``. One launch of one thread, no sync."""
        floats, integers = (scale, found_inf), (growth_tracker, hysteresis_tracker)
        for dtype, tensors in ((torch.float32, floats), (torch.int32, integers)):
            for tensor in tensors:
                self._require_one_element(tensor, "update_scale_", (dtype,))
        arguments = (
            *(_pointer(tensor) for tensor in (scale, *integers, found_inf)),
            ctypes.c_double(growth_factor),
            ctypes.c_double(backoff_factor),
            ctypes.c_int(min(growth_interval, 2**31 - 1)),
            ctypes.c_float(min_scale),
            ctypes.c_float(min(max_scale, torch.finfo(torch.float32).max)),
            ctypes.c_int(hysteresis),
            ctypes.c_int(hysteresis_mode),
        )
        self._launcher.launch(UPDATE_SCALE, 1, arguments)
        increment_versions([scale, *integers])

    def clip_factor(self, norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
        """Find the factor of clipping; see ``reference.clip_factor``. One launch of one thread, no sync."""
        for tensor, name in ((norm, "norm"), (scale, "scale")):
            if tensor is not None:
                self._require_one_element(tensor, name, (torch.float32,))
        factor = self._empty((), torch.float32)
        address = ctypes.c_void_p(None) if scale is None else _pointer(scale)
        arguments = (_pointer(norm), ctypes.c_float(max_norm), address, _pointer(factor))
        self._launcher.launch(CLIP_FACTOR, 1, arguments)
        return factor

    def _finalise(
        self, norm: str, norm_type: float, table: TensorTable, partials: Tensor, scalar: DeviceScalar
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = self._empty((), torch.float32)
        found_inf = self._empty((), torch.float32)
        flags = self._empty(table.count, torch.uint8)
        arguments = (
            _pointer(partials),
            ctypes.c_uint32(table.blocks),
            ctypes.c_uint32(table.count),
            ctypes.c_double(norm_type),
            scalar,
            *(_pointer(output) for output in (total, found_inf, flags)),
        )
        self._launcher.launch(FINALISE[norm], 1, arguments)
        return total, found_inf, flags

    def _table(self, described: NDArray[Any], *, cast: bool = False) -> TensorTable:
        return self._tables.of(described, cast=cast, keep=not self._launcher.capturing())

    def _empty(self, size: int | tuple[()], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._launcher.device)

    def _scalar(self, tensor: Tensor, name: str) -> DeviceScalar:
        self._require_one_element(tensor, name, (torch.float32, torch.float64))
        return DeviceScalar(tensor.data_ptr(), tensor.dtype == torch.float64)

    def _require_one_element(self, tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
        if tensor.device == self._launcher.device and tensor.numel() == 1 and tensor.dtype in dtypes:
            return
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        msg = (
            f"{name}: got a tensor of {tensor.numel()} elements, {tensor.dtype}, on {tensor.device}; "
            f"give one element of {allowed} on {self._launcher.device}"
        )
        raise ValueError(msg)


def _table_arguments(table: TensorTable) -> tuple[Any, ...]:
    assert table.rows is not None  # noqa: S101 - for the type checker: callers asked table.blocks
    return _pointer(table.rows), ctypes.c_uint32(table.count), ctypes.c_uint32(table.chunk)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _dense(tensors: Sequence[Tensor], *, writes: bool = False) -> tuple[Sequence[Tensor], NDArray[Any]]:
    """The tensors and their description; in place of one with gaps, a dense copy."""
    described = describe(tensors, writes=writes)
    if (described["flags"] & DENSE).all():
        return tensors, described
    flags = described["flags"] & DENSE
    dense = [t if flag else t.detach().contiguous() for t, flag in zip(tensors, flags, strict=True)]
    return dense, describe(dense)


@contextlib.contextmanager
def _written(tensors: Sequence[Tensor]) -> Iterator[NDArray[Any]]:
    """Describe tensors to write; those with gaps are written through a dense copy."""
    dense, described = _dense(tensors, writes=True)
    yield described
    if dense is not tensors:
        with torch.no_grad():
            for tensor, copy in zip(tensors, dense, strict=True):
                if tensor is not copy:
                    tensor.copy_(copy)


def _castable(described: NDArray[Any]) -> NDArray[np.bool_]:
    flags, dtypes = described["flags"], (described["dtype"], described["out_dtype"])
    fits = (flags & (DENSE | ALIKE)) == (DENSE | ALIKE)
    return np.asarray(fits & (dtypes[0] <= _LAST_CASTABLE) & (dtypes[1] <= _LAST_CASTABLE))
