"""A launcher that runs the package's CUDA kernels on the CPU, from the very same sources."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_plugin.kernels.cuda.catalogue import WRITE_TABLE, Kernel
from amp_plugin.kernels.cuda.tensor_table import ROW, ROWS_BY_VALUE

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "amp_plugin" / "kernels" / "cuda"
FLAGS = [
    "-std=c++20",
    "-O1",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-dangling-pointer",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-fsanitize=alignment,bounds,shift",
    "-fno-sanitize-recover",
]


def compiler() -> str | None:
    """g++, which the emulation needs."""
    return shutil.which("g++")


def build(kernel: Kernel, folder: Path, file: Path | None = None) -> Path:
    """Compile a kernel for the CPU; an object of the same sources is used again."""
    source = file or SOURCES / f"{kernel.name}.cu"
    command = [compiler(), *FLAGS, f"-I{SOURCES}", f"-I{HERE}", str(HERE / "emulate.cpp")]
    command += [f"-DKERNEL={kernel.name}", f'-DKERNEL_FILE="{source}"', f"-DNORM={kernel.norm}"]
    inputs = sorted([*SOURCES.glob("*.cu*"), *HERE.glob("*.h"), *HERE.glob("*.cpp"), source])
    identity = hashlib.sha256(b"".join([repr(command).encode(), *(path.read_bytes() for path in inputs)]))
    target = folder / f"{kernel.name}-{kernel.norm}-{identity.hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, text=True)
            built.replace(target)
    return target


class EmulatedDevice:
    """Stands for a CUDA device of two multiprocessors; tensors are CPU tensors.

    Attributes:
        descending: Run threads, warps and blocks backwards.
        in_capture: Pretend that the stream is being captured.
        launches: The kernels launched, by name.
        uploads: How many tables were brought to the device.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, multiprocessors: int = 2) -> None:
        self.multiprocessors = multiprocessors
        self.descending = False
        self.in_capture = False
        self.current_stream = 0
        self.launches: list[str] = []
        self.uploads = 0
        self._folder = folder
        self._loaded: dict[Kernel, Any] = {}

    def stream(self) -> int:
        return self.current_stream

    def capturing(self) -> bool:
        return self.in_capture

    def upload(self, rows: NDArray[Any]) -> Tensor:
        self.uploads += 1
        table = self._new_table(rows)
        if not self.capturing():
            return self._fill(table, rows)
        for begin in range(0, len(rows), ROWS_BY_VALUE):
            some = rows[begin : begin + ROWS_BY_VALUE]
            by_value = _aligned_copy(some.tobytes().ljust(ROWS_BY_VALUE * ROW.itemsize, b"\xab"))
            target = ctypes.c_void_p(table.data_ptr() + begin * ROW.itemsize)
            self.launch(WRITE_TABLE, 1, (by_value, ctypes.c_uint32(len(some)), target))
        return table

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[Any]) -> None:
        self.launches.append(kernel.name)
        self._run(kernel, blocks, arguments)

    def _new_table(self, rows: NDArray[Any]) -> Tensor:
        return torch.full((rows.nbytes,), 0xAB, dtype=torch.uint8)

    def _fill(self, table: Tensor, rows: NDArray[Any]) -> Tensor:
        return table.copy_(torch.from_numpy(rows.view(np.uint8)))

    def _run(self, kernel: Kernel, blocks: int, arguments: Sequence[Any]) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(one) for one in arguments])
        order = ctypes.c_int(self.descending)
        error = self._entry(kernel)(
            ctypes.c_uint(blocks), ctypes.c_uint(kernel.threads), ctypes.byref(pointers), order
        )
        if error:
            raise RuntimeError(f"{kernel.name}: {error.decode()}")

    def _entry(self, kernel: Kernel) -> Any:
        if kernel not in self._loaded:
            library = ctypes.CDLL(str(build(kernel, self._folder)))
            library.emulate.restype = ctypes.c_char_p
            self._loaded[kernel] = library.emulate
        return self._loaded[kernel]


def _aligned_copy(raw: bytes) -> Any:
    """ctypes memory at a multiple of 16 bytes, as a kernel argument has it."""
    memory = bytearray(len(raw) + 16)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 16
    memory[start : start + len(raw)] = raw
    return (ctypes.c_uint8 * len(raw)).from_buffer(memory, start)


def object_folder() -> Path:
    """Where the emulated kernels are kept from run to run: a private folder of this user."""
    folder = Path(tempfile.gettempdir()) / f"amp_plugin_emulation_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="amp_plugin_emulation_"))
    return folder
