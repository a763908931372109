"""Two CUDA devices in host memory: torch's ops run on the CPU's kernels, and our kernels are emulated.

Tensors report the device ``cuda:0`` and are dispatched accordingly. Autograd has a thread for each device.
Mixing host and device tensors is an error, and so is waiting for the device where that is forbidden. A
captured graph replays its ops and launches. Only the arithmetic is that of the host.

    python -m pytest -p tests.host_device.plugin -m gpu

The shared object must be loaded before torch. :func:`environment` returns the variables with which to start a
process.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from amp_plugin.kernels.cuda import SOURCES, Kernel, Tuning, all_kernels, tuning_of
from tests.host_device.emulation.emulated_kernels import (
    build,
    compiler,
    object_folder,
    torch_headers,
    torch_libraries,
)
from tests.host_device.streams import (
    HostEvent,
    HostGraph,
    HostStream,
    current_stream,
    default_stream,
    index_of,
    set_stream,
)

LOADED = "host_device" in os.environ.get("LD_PRELOAD", "")
HERE = Path(__file__).parent
COMPILER = "amp_plugin.kernels.cuda.compile"
COUNT = 2


def cannot() -> str:
    """Return the reason why the device cannot be used here, or an empty string."""
    if torch.version.cuda is not None and not LOADED:
        return "this build of torch has CUDA's own kernels"
    return "" if compiler() else "needs g++"


def library() -> Path:
    """Compile the device, unless it was already compiled for this torch and these sources."""
    command = [compiler(), "-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra"]
    command += ["-Wno-unused-parameter", "-Wno-unknown-pragmas"]
    command += torch_headers()
    link = torch_libraries("torch_cpu", "c10")
    common = [repr(command), torch.__version__, *(path.read_text() for path in sorted(HERE.glob("*.h")))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sources = sorted(HERE.glob("*.cpp"))
        objects = list(pool.map(lambda source: _object([*command, "-c"], source, common), sources))
    target = object_folder() / f"host_device-{_digest(repr(link), *map(str, objects), 'driver')}.so"
    soname = "-Wl,-soname,libcuda.so.1"  # so that the package finds its driver in this library
    return _made(target, [compiler(), "-shared", soname, *map(str, objects), *link])


def _object(command: list[str], source: Path, common: list[str]) -> Path:
    target = object_folder() / f"{source.stem}-{_digest(*common, source.read_text())}.o"
    return _made(target, [*command, str(source)])


def _made(target: Path, command: list[str]) -> Path:
    with FileLock(f"{target}.lock"):  # several test processes may start at the same time
        if not target.exists():
            scratch = target.with_suffix(".tmp")
            subprocess.run([*command, "-o", str(scratch)], check=True)
            scratch.replace(target)
    return target


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def environment() -> dict[str, str]:
    """Return the environment variables for a process that uses the device."""
    return {**os.environ, "LD_PRELOAD": str(library())}


@contextlib.contextmanager
def late_work() -> Iterator[None]:
    """Delay all work of the device until the program waits for its stream. Memory is freed late, too."""
    torch.ops.host_device.late(True)
    try:
        yield
    finally:
        torch.ops.host_device.late(False)


def install_if_loaded(*, kernels: bool = True) -> None:
    """Make ``torch.cuda`` use the device, in a process that was started with :func:`environment`.

    Args:
        kernels: Whether the package's CUDA kernels can be launched on it, by emulation.
    """
    if not LOADED:
        return
    device = torch.ops.host_device
    if kernels:
        ours = types.ModuleType(COMPILER)
        ours.architecture_for = lambda *_: "host"
        ours.nvrtc_version = lambda: "of g++"
        ours.identity_of = lambda *_: 1
        ours.all_cubins = _all_objects
        ours.build_ahead = lambda *_: None
        sys.modules[COMPILER] = ours
    else:
        sys.modules.pop(COMPILER, None)  # a rehearsal has put one there in each of its processes
    torch.version.cuda = "13.0"
    for name, value in _namespace(device).items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("CUDAGraph", "graph_pool_handle", "is_current_stream_capturing"):
        setattr(torch.cuda.graphs, name, getattr(torch.cuda, name))
    _let_storages_move(device)
    torch._C._host_emptyCache = lambda: None
    torch._C._scatter = _scatter
    torch._C._gather = _gather
    torch._C._broadcast_coalesced = lambda tensors, devices, size: [
        [tensor.to(f"cuda:{index}", copy=True) for tensor in tensors] for index in devices
    ]


def _all_objects(_: str) -> dict[Kernel, bytes]:
    """Return the paths of the emulated kernels.

    Only one kernel is built with its tuned parameters, because compiling takes long.
    """
    alike = os.environ.get("HOST_DEVICE_FAULT") == "all builds are alike"
    return {
        kernel: f"{build(kernel, object_folder(), _sources_of(kernel), tuned)}\0".encode()
        for kernel in all_kernels()
        for tuned in [tuning_of(kernel) if kernel.name == "multiply" and not alike else Tuning()]
    }


def _sources_of(kernel: Kernel) -> Path:
    """Return the folder of the package's sources, or one with a planted fault.

    HOST_DEVICE_FAULTY="kernel folder" names a kernel and the folder of its faulty source.
    """
    faulty, _, folder = os.environ.get("HOST_DEVICE_FAULTY", "").partition(" ")
    return Path(folder) if kernel.name == faulty else SOURCES


def _let_storages_move(device: Any) -> None:
    """Let storages be copied to and from the device, for deepcopy, torch.save and torch.load."""

    def to(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        if where == storage.device:
            return storage
        return torch.ops.host_device.copy_of(storage, where).untyped_storage()

    storages = torch.UntypedStorage
    storages.clone = lambda storage: device.copy_of(storage, storage.device).untyped_storage()
    storages.to = to
    storages.cpu = lambda storage: to(storage, device="cpu")
    storages.cuda = lambda storage, index=None, non_blocking=False: to(
        storage, device=f"cuda:{index_of(index)}"
    )


def _namespace(device: Any) -> dict[str, Any]:
    properties = SimpleNamespace(
        name="host memory", major=9, minor=0, multi_processor_count=4, total_memory=2**30, uuid="0"
    )

    def set_sync_debug_mode(mode: str | int) -> None:
        modes = ("default", "warn", "error")
        device.set_sync_debug_mode(modes.index(mode) if isinstance(mode, str) else mode)

    def exchange(index: int) -> int:
        return device.exchange_device(index)

    return {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: COUNT,
        "current_device": lambda: exchange(-1),
        "set_device": lambda which: exchange(index_of(which)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda index: exchange(index),  # noqa: PLW0108 - Dynamo wants two
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_name": lambda *_: properties.name,
        "synchronize": lambda *_: device.synchronize(),
        "set_sync_debug_mode": set_sync_debug_mode,
        "is_current_stream_capturing": device.capturing,
        "memory_allocated": lambda *_: device.memory_allocated(),
        "max_memory_allocated": lambda *_: device.max_memory_allocated(),
        "mem_get_info": lambda *_: (2**30 - device.driver_bytes(), 2**30),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: device.reset_peak_memory_stats(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "get_rng_state_all": list,
        "set_rng_state": lambda *_: None,
        "set_rng_state_all": lambda states: None,
        "_sleep": lambda cycles: None,
        "Stream": HostStream,
        "Event": HostEvent,
        "CUDAGraph": HostGraph,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "graph_pool_handle": lambda: (0, 0),
    }


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[Tensor]:
    chunks = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    return [chunk.to(f"cuda:{index}", copy=True) for chunk, index in zip(chunks, devices, strict=False)]


def _gather(tensors: Sequence[Tensor], dim: int, index: int) -> Tensor:
    return torch.cat([tensor.to(f"cuda:{index}") for tensor in tensors], dim)
