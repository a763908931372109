"""Put kernels on torch's streams through the CUDA driver.

Kernels are loaded per device at their first launch and stay loaded. A launch goes to the
current stream of the device, whichever thread asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver  # type: ignore[import-untyped]
from cuda.core import Device, ObjectCode  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from amp_plugin.kernels.cuda.catalogue import WRITE_TABLE, Kernel
from amp_plugin.kernels.cuda.compile import architecture_for, cached_cubin, nvrtc_version
from amp_plugin.kernels.cuda.tensor_table import ROW, ROWS_BY_VALUE

OLDEST_CAPABILITY = (7, 5)


class CudaLauncher:
    """One CUDA device.

    Args:
        device: A CUDA device with an index.

    Attributes:
        device: The same.
        multiprocessors: How many it has.
        architecture: As ``"sm_90"``.

    Raises:
        RuntimeError: The device is older than compute capability 7.5.
    """

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        if capability < OLDEST_CAPABILITY:
            msg = f"{properties.name} has compute capability {capability}; the CUDA kernels need 7.5 or newer"
            raise RuntimeError(msg)
        self.device = device
        self.multiprocessors: int = properties.multi_processor_count
        self.architecture = architecture_for(*capability)
        self._make_current = Device(device.index).set_current
        self._bound = threading.local()
        self._lock = threading.Lock()
        self._loaded: dict[Kernel, tuple[Any, Any]] = {}

    def stream(self) -> int:
        """Return the handle of the current stream of the device."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def capturing(self) -> bool:
        """Return True while the current stream is being captured into a graph."""
        with self._on_device():
            return torch.cuda.is_current_stream_capturing()

    def upload(self, rows: NDArray[Any]) -> Tensor:
        """Copy rows to the device in stream order.

        From pinned memory, which torch's host allocator hands out again only after an event
        behind the copy; during a capture as kernel arguments.

        Args:
            rows: `ROW` records.

        Returns:
            uint8 ``[32 * len(rows)]`` on the device.
        """
        table = torch.empty(rows.nbytes, dtype=torch.uint8, device=self.device)
        if self.capturing():
            for begin in range(0, len(rows), ROWS_BY_VALUE):
                self._write_by_value(rows[begin : begin + ROWS_BY_VALUE], table, begin)
            return table
        pinned = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        pinned.numpy()[:] = rows.view(np.uint8)
        return table.copy_(pinned, non_blocking=True)

    def _write_by_value(self, rows: NDArray[Any], table: Tensor, begin: int) -> None:
        by_value = (ctypes.c_uint8 * (ROWS_BY_VALUE * ROW.itemsize)).from_buffer_copy(
            rows.tobytes().ljust(ROWS_BY_VALUE * ROW.itemsize, b"\0")
        )
        target = ctypes.c_void_p(table.data_ptr() + begin * ROW.itemsize)
        self.launch(WRITE_TABLE, 1, (by_value, ctypes.c_uint32(len(rows)), target))

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel on the current stream of the device.

        Args:
            kernel: Compiled and loaded if it was not yet.
            blocks: How many blocks, at least 1.
            arguments: ctypes objects, one per parameter of the kernel, of its type.

        Raises:
            RuntimeError: The driver refused the launch.
        """
        with self._on_device():
            function = self.load(kernel)
            pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(one) for one in arguments])
            grid, block = (blocks, 1, 1), (kernel.threads, 1, 1)
            where = ctypes.addressof(pointers)
            (status,) = driver.cuLaunchKernel(function, *grid, *block, 0, self.stream(), where, 0)
        if int(status):
            msg = f"the CUDA driver refused {kernel.name} ({blocks} blocks) on {self.device}: {status!r}"
            raise RuntimeError(msg)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the device and its context current; a new thread has no context yet."""
        elsewhere = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext():
            if not getattr(self._bound, "done", False):
                self._make_current()
                self._bound.done = True
            yield

    def load(self, kernel: Kernel) -> Any:
        """Return the driver's handle of a kernel, compiled and loaded if it was not yet."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            with self._lock, self._on_device(), _outside_capture():
                loaded = self._loaded.get(kernel) or self._load(kernel)
                self._loaded[kernel] = loaded
        return loaded[0]

    def _load(self, kernel: Kernel) -> tuple[Any, Any]:
        code = ObjectCode.from_cubin(cached_cubin(kernel, self.architecture))
        try:
            entry = code.get_kernel(kernel.name)
        except Exception as error:  # cuda-core's error types are not public
            raise RuntimeError(self._not_loaded(kernel, error)) from error
        # Asking for the function loads it now; CUDA's lazy loading would do so in the first launch.
        status, function = driver.cuKernelGetFunction(driver.CUkernel(int(entry.handle)))
        if int(status):
            raise RuntimeError(self._not_loaded(kernel, f"{status!r}"))
        return function, (code, entry)  # what must stay alive beside it

    def _not_loaded(self, kernel: Kernel, reason: object) -> str:
        return (
            f"the CUDA driver cannot load {kernel.name} for {self.architecture}, compiled by NVRTC "
            f"{nvrtc_version()} ({reason}); update the driver to that major version of CUDA or a later one, "
            "or install cuda-bindings and NVRTC of the driver's"
        )


@contextlib.contextmanager
def _outside_capture() -> Iterator[None]:
    """Let this thread load code although it captures a stream: nothing of it goes to the stream."""
    _, mode = driver.cuThreadExchangeStreamCaptureMode(
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    )
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)
