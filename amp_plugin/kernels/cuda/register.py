"""Decide, at the first CUDA tensor, whether the CUDA kernels or plain torch serve a device.

The C++ kernels on the CUDA key (``csrc/cuda_ops.cpp``) ask once for each device, and once for the
machine code of each kernel. Importing this starts neither CUDA nor NVRTC.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.library import Library

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.tracers import outside_tracers, untraced
from amp_plugin.user_warnings import warn_user

PACKAGES: Final = (
    "'cuda-core>=1.0.1' 'cuda-bindings>=12.9' nvidia-cuda-nvrtc"  # for pip, as in pyproject.toml
)
OLDEST_CAPABILITY: Final = (7, 5)
_lock = threading.Lock()
_reasons: dict[int, str] = {}  # by device index: why plain torch serves it; empty if it does not
_architectures: dict[int, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCore:
    """Whether the CUDA kernels serve a device.

    Attributes:
        loaded: True if they do.
        reason: Why not, in one sentence, with the way out; empty if they do.
        architecture: What they are compiled for, as ``"sm_90"``; empty if they are not.
    """

    loaded: bool
    reason: str
    architecture: str = ""


def cuda_core(device: int | None = None) -> CudaCore:
    """Find out whether the CUDA kernels serve a device, compiling one of them.

    Never raises because something is missing, and warns once for a device that plain torch has
    to serve. Starts CUDA if there is any.

    Args:
        device: Index of the device; by default the current one.

    Returns:
        The finding, the same for a device throughout a process.
    """
    if reason := _no_cuda():
        return CudaCore(loaded=False, reason=reason)
    index = torch.cuda.current_device() if device is None else device
    loaded = prepare(index)
    architecture = _architectures[index] if loaded else ""
    return CudaCore(loaded=loaded, reason=_reasons[index], architecture=architecture)


def _no_cuda() -> str:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA; install one that has"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver with nvidia-smi"
    return ""


def prepare(index: int) -> bool:
    """Open a device for the kernels, at the first call; return whether they serve it.

    Args:
        index: Of the device.
    """
    if index not in _reasons:
        with _lock:
            if index not in _reasons:
                _reasons[index] = _open(index)
    return not _reasons[index]


@untraced
def _prepare(index: int) -> bool:
    return prepare(index)


@untraced
def _compile(index: int, name: str, norm: str) -> Tensor:
    """Return the machine code of a kernel for a device, uint8 on the host."""
    # Here and not above: cuda-core may be missing, and importing amp_plugin must stay cheap.
    from amp_plugin.kernels.cuda.catalogue import find  # noqa: PLC0415
    from amp_plugin.kernels.cuda.compile import cached_cubin  # noqa: PLC0415

    code = bytearray(cached_cubin(find(name, norm), _architectures[index]))
    return torch.frombuffer(code, dtype=torch.uint8)


def _open(index: int) -> str:
    """Return why the kernels cannot serve the device, after a warning; empty if they can."""
    if os.environ.get("AMP_PLUGIN_NATIVE") == "0":
        return "AMP_PLUGIN_NATIVE=0 turns native code off; unset it"
    try:
        with outside_tracers():
            _try_one(index)
    except Exception as error:  # noqa: BLE001 - cuda-core has error types of its own
        reason = _explain(error)
        text = (
            f"amp_plugin's CUDA kernels are not available on cuda:{index}, plain torch takes over: {reason}"
        )
        warn_user(text, RuntimeWarning)
        return reason
    return ""


def _try_one(index: int) -> None:
    """Try NVRTC, the cache and the driver, before they are relied on."""
    core = native_core()
    if not core.loaded:
        msg = f"the native core, which launches them, is not loaded: {core.reason}"
        raise RuntimeError(msg)
    from amp_plugin.kernels.cuda.compile import architecture_for, nvrtc_version  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < OLDEST_CAPABILITY:
        msg = f"{properties.name} has compute capability {capability}; the CUDA kernels need 7.5 or newer"
        raise RuntimeError(msg)
    _architectures[index] = architecture_for(*capability)
    torch.ops.amp_plugin._cuda_open(index, properties.multi_processor_count)
    try:
        torch.ops.amp_plugin._cuda_load(index, "update_scale", "")
    except RuntimeError as error:
        msg = f"{error} (compiled by NVRTC {nvrtc_version()} for {_architectures[index]})"
        raise RuntimeError(msg) from error


def _explain(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"{error}; install or update cuda-core (pip install --upgrade {PACKAGES})"
    return f"{type(error).__name__}: {error}"


def register(library: Library) -> None:
    """Define what C++ asks of Python; imports and starts nothing.

    Args:
        library: Of the namespace amp_plugin.
    """
    for schema, function in (
        ("_cuda_prepare(int device) -> bool", _prepare),
        ("_cuda_compile(int device, str name, str norm) -> Tensor", _compile),
    ):
        library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
