"""Decide, at the first CUDA tensor, whether the CUDA kernels or plain torch serve an op.

The dispatcher always calls the functions here for CUDA tensors, so importing the package
neither imports cuda-core nor starts CUDA.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library

from amp_plugin.kernels import multi_tensor
from amp_plugin.kernels.tracers import untraced

if TYPE_CHECKING:
    from amp_plugin.kernels.cuda.operations import Operations

OPS = ("norm_check", "unscale_", "multiply_", "cast", "update_scale_", "clip_factor")
PACKAGES = "'cuda-core>=1.0.1' 'cuda-bindings>=12.9' nvidia-cuda-nvrtc"  # for pip, as in pyproject.toml
_lock = threading.Lock()
_operations: dict[int, Operations | None] = {}  # by device index; None: plain torch
_reasons: dict[int, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCore:
    """Whether the CUDA kernels serve a device.

    Attributes:
        loaded: True if they do.
        reason: Why not, in one sentence, with the way out; empty if they do.
    """

    loaded: bool
    reason: str


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
    operations = _operations_of(index)
    return CudaCore(loaded=operations is not None, reason=_reasons.get(index, ""))


def _no_cuda() -> str:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA; install one that has"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver with nvidia-smi"
    return ""


def _operations_of(index: int) -> Operations | None:
    try:
        return _operations[index]
    except KeyError:
        pass
    with _lock:
        if index not in _operations:
            _operations[index] = _load(index)
    return _operations[index]


def _load(index: int) -> Operations | None:
    if os.environ.get("AMP_PLUGIN_NATIVE") == "0":
        _reasons[index] = "AMP_PLUGIN_NATIVE=0 turns native code off; unset it"
        return None
    try:
        # Here and not above: cuda-core is optional, and importing amp_plugin must stay cheap.
        from amp_plugin.kernels.cuda.catalogue import UPDATE_SCALE, WRITE_TABLE  # noqa: PLC0415
        from amp_plugin.kernels.cuda.launcher import CudaLauncher  # noqa: PLC0415
        from amp_plugin.kernels.cuda.operations import Operations  # noqa: PLC0415

        launcher = CudaLauncher(torch.device("cuda", index))
        launcher.load(UPDATE_SCALE)  # NVRTC, the cache and the driver, tried once before we rely on them
        launcher.load(WRITE_TABLE)  # the only one that no warm-up before a graph capture would load
    except Exception as error:  # noqa: BLE001 - cuda-core has error types of its own
        _reasons[index] = _explain(error)
        warnings.warn(
            f"amp_plugin's CUDA kernels are not available on cuda:{index}, plain torch takes over: "
            f"{_reasons[index]}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return Operations(launcher)


def _explain(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"{error}; install or update cuda-core (pip install --upgrade {PACKAGES})"
    return f"{type(error).__name__}: {error}"


def register(library: Library) -> None:
    """Register the ops for CUDA tensors; imports and starts nothing.

    Args:
        library: Of the namespace amp_plugin, with the schemas defined.
    """
    for name in OPS:
        library.impl(name, _kernel(name), "CUDA")  # type: ignore[no-untyped-call]


def _kernel(name: str) -> Callable[..., Any]:
    plain = getattr(multi_tensor, name)

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        device = _device_of(arguments)
        operations = _operations_of(device)
        return (plain if operations is None else getattr(operations, name))(*arguments, **keywords)

    kernel.__name__ = name
    return untraced(kernel)  # pointers and launches are nothing to trace


def _device_of(arguments: tuple[Any, ...]) -> int:
    """The scale decides (and is the second or first argument); for a cast, the first tensor."""
    for argument in (arguments[1], arguments[0]):
        tensor = next(iter(argument), None) if isinstance(argument, list | tuple) else argument
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            return int(tensor.device.index)
    return torch.cuda.current_device()
