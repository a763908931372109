"""Decide, at the first CUDA tensor, whether the CUDA kernels or plain torch serve a device.

The C++ kernels on the CUDA key (csrc/cuda_ops.cpp) ask once. Importing this starts neither CUDA nor NVRTC.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Final

import torch
from torch.library import Library

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda import tuning_of
from amp_plugin.kernels.tracers import outside_tracers, untraced
from amp_plugin.messages import warn_user

PACKAGES: Final = "'cuda-core>=1.0.1' 'cuda-bindings>=12.9' nvidia-cuda-nvrtc"  # as in pyproject.toml
OLDEST_CAPABILITY: Final = (7, 5)
_lock = threading.Lock()
_cores: dict[int, CudaCore] = {}  # by device index


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCore:
    """Whether the CUDA kernels serve a device."""

    loaded: bool
    reason: str = ""  # why not, in one sentence, with the way out
    architecture: str = ""  # what they are compiled for, as "sm_90"
    identity: int = 0  # of what decides their last bits, for ranks to compare: compile.identity_of


def cuda_core(device: int | None = None) -> CudaCore:
    """Find out whether the CUDA kernels serve a device, compiling and loading them at the first call.

    Never raises because something is missing, and warns once for a device that plain torch has to serve.
    Starts CUDA if there is any. The finding is the same throughout a process.
    """
    if reason := _no_cuda():
        return CudaCore(loaded=False, reason=reason)
    index = torch.cuda.current_device() if device is None else device
    if index not in _cores:
        with _lock:
            if index not in _cores:
                _cores[index] = _open(index)
    return _cores[index]


def _no_cuda() -> str:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA; install one that has"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver with nvidia-smi"
    return ""


def _open(index: int) -> CudaCore:
    """Open a device for the kernels, or warn that they cannot serve it."""
    if os.environ.get("AMP_PLUGIN_NATIVE") == "0":
        return CudaCore(loaded=False, reason="AMP_PLUGIN_NATIVE=0 turns native code off; unset it")
    try:
        with outside_tracers():
            return _load_all(index)
    except Exception as error:  # noqa: BLE001 - cuda-core has error types of its own
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            reason = f"{error}; install or update cuda-core (pip install --upgrade {PACKAGES})"
        text = f"amp_plugin's CUDA kernels are not available on cuda:{index}, plain torch takes over"
        warn_user(f"{text}: {reason}", RuntimeWarning)
        return CudaCore(loaded=False, reason=reason)


def _load_all(index: int) -> CudaCore:
    """Compile and load every kernel, so that no later step can fail for want of one."""
    core = native_core()
    if not core.loaded:
        msg = f"the native core, which launches them, is not loaded: {core.reason}"
        raise RuntimeError(msg)
    # Here and not above: cuda-core may be missing, and importing amp_plugin must stay cheap.
    import amp_plugin.kernels.cuda.compile as nvrtc  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < OLDEST_CAPABILITY:
        msg = f"{properties.name} has compute capability {capability}; the CUDA kernels need 7.5 or newer"
        raise RuntimeError(msg)
    architecture = nvrtc.architecture_for(*capability)
    cubins = nvrtc.all_cubins(architecture)
    names = [kernel.title for kernel in cubins]
    code = [torch.frombuffer(bytearray(cubin), dtype=torch.uint8) for cubin in cubins.values()]
    blocks = [properties.multi_processor_count * tuning_of(kernel).blocks for kernel in cubins]
    try:
        torch.ops.amp_plugin._cuda_open(index, blocks, names, code)
    except RuntimeError as error:
        msg = f"{error} (compiled by NVRTC {nvrtc.nvrtc_version()} for {architecture})"
        raise RuntimeError(msg) from error
    identity = nvrtc.identity_of(architecture, blocks)
    return CudaCore(loaded=True, architecture=architecture, identity=identity)


@untraced
def _prepare(index: int) -> bool:
    return cuda_core(index).loaded


def register(library: Library) -> None:
    """Define what C++ asks of Python; imports and starts nothing."""
    library.define("_cuda_prepare(int device) -> bool")  # type: ignore[no-untyped-call]
    library.impl("_cuda_prepare", _prepare, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
