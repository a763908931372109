"""Where tensors are and how they lie, as one array: the native core's work, or Python's.

It is the first thing a launch needs and the only one whose host time grows with the number
of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_plugin.kernels.build import native_core

DESCRIPTION: Final = np.dtype(
    [
        ("address", np.uint64),
        ("out_address", np.uint64),
        ("numel", np.uint64),
        ("device", np.uint32),  # type * 65536 + index; type is 0 for the CPU, 1 for CUDA
        ("dtype", np.uint8),
        ("out_dtype", np.uint8),
        ("flags", np.uint16),
    ]
)
DENSE: Final = 1  # the elements fill one run of memory
ALIKE: Final = 2  # sizes, strides and device are those of the output
UNKNOWN_DTYPE: Final = 255
DTYPE_CODES: Final = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
_DEVICE_TYPES: Final = {"cpu": 0, "cuda": 1}


def describe(tensors: Sequence[Tensor], out: Sequence[Tensor] = (), *, writes: bool = False) -> NDArray[Any]:
    """Describe tensors.

    Args:
        tensors: Strided tensors.
        out: For a cast, the tensor each is written to; else empty.
        writes: Tell autograd that ``out``, or without it ``tensors``, are being written.

    Returns:
        `DESCRIPTION` records, one per tensor.
    """
    if native_core().loaded:
        rows: Tensor = torch.ops.amp_plugin._describe(tensors, out, writes)
        return rows.numpy().view(DESCRIPTION)
    if writes:
        increment_versions(out or tensors)
    return describe_in_python(tensors, out)


def describe_in_python(tensors: Sequence[Tensor], out: Sequence[Tensor] = ()) -> NDArray[Any]:
    """Do as :func:`describe` without the native core."""
    rows = np.zeros(len(tensors), dtype=DESCRIPTION)
    rows["address"] = [t.data_ptr() for t in tensors]
    rows["numel"] = [t.numel() for t in tensors]
    rows["device"] = [device_number(t.device) for t in tensors]
    rows["dtype"] = [DTYPE_CODES.get(t.dtype, UNKNOWN_DTYPE) for t in tensors]
    rows["flags"] = [DENSE * is_dense(t) for t in tensors]
    if out:
        rows["out_address"] = [t.data_ptr() for t in out]
        rows["out_dtype"] = [DTYPE_CODES.get(t.dtype, UNKNOWN_DTYPE) for t in out]
        rows["flags"] |= np.array(
            [ALIKE * _alike(*pair) for pair in zip(tensors, out, strict=True)], np.uint16
        )
    return rows


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that tensors were written; inference tensors have no version."""
    if native_core().loaded:
        torch.ops.amp_plugin._increment_versions(tensors)
    else:
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def device_number(device: torch.device) -> int:
    """Return the number that stands for a device in a description."""
    index = 0xFFFF if device.index is None else device.index
    return (_DEVICE_TYPES.get(device.type, 0xFF) << 16) + index


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


def _alike(tensor: Tensor, out: Tensor) -> bool:
    same = tensor.shape == out.shape and tensor.stride() == out.stride()
    return bool(same and tensor.device == out.device)
