"""Decides on first use whether a device runs amp_plugin's CUDA kernels or plain torch.

The C++ kernels for the CUDA dispatch key (csrc/served_ops.h) call this module once per device. Importing this
module initializes neither CUDA nor NVRTC.
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

# The same as in pyproject.toml.
PACKAGES: Final = "'cuda-core>=1.0.1' 'cuda-bindings>=12.9' nvidia-cuda-nvrtc"
OLDEST_CAPABILITY: Final = (7, 5)
_lock = threading.Lock()
_cores: dict[int, CudaCore] = {}  # by device index


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCore:
    """Whether a device uses amp_plugin's CUDA kernels, and the reason if it does not."""

    loaded: bool
    # Why the CUDA kernels are not used, and how to change that.
    reason: str = ""
    # The GPU architecture for which the kernels are compiled, such as "sm_90".
    architecture: str = ""
    # The result of compile.identity_of. Ranks compare it, because their results must agree to the last bit.
    identity: int = 0


def cuda_core(device: int | None = None) -> CudaCore:
    """Return whether a device can use the CUDA kernels. The first call compiles and loads the kernels.

    If something is missing, no error is raised, but one warning says that the device uses plain torch. The
    first call initializes CUDA if CUDA is available. The result stays the same for the lifetime of the
    process.
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
    """Load the CUDA kernels on a device, or warn that the device uses plain torch."""
    if os.environ.get("AMP_PLUGIN_NATIVE") == "0":
        return CudaCore(loaded=False, reason="AMP_PLUGIN_NATIVE=0 turns native code off; unset it")
    try:
        with outside_tracers():
            return _load_all(index)
    except Exception as error:  # noqa: BLE001 - cuda-core has its own error types
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            reason = f"{error}; install or update cuda-core (pip install --upgrade {PACKAGES})"
        text = f"amp_plugin's CUDA kernels are not available on cuda:{index}, so plain torch is used"
        warn_user(f"{text}: {reason}", RuntimeWarning)
        return CudaCore(loaded=False, reason=reason)


def _load_all(index: int) -> CudaCore:
    """Compile and load all CUDA kernels now, so that no later step can fail for lack of a kernel."""
    core = native_core()
    if not core.loaded:
        msg = f"the native core, which launches them, is not loaded: {core.reason}"
        raise RuntimeError(msg)
    # This import is not at the top, because cuda-core may be missing and is slow to import.
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
    """Define the op through which C++ code calls :func:`cuda_core`. This imports and initializes nothing."""
    library.define("_cuda_prepare(int device) -> bool")  # type: ignore[no-untyped-call]
    library.impl("_cuda_prepare", _prepare, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
