"""Each storage's values as they would be without rounding to 16 bits: the shadow that runs along."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_plugin.numerics.op_call import PLAIN, is_low_precision
from amp_plugin.numerics.storages import Storages


class ShadowValues:
    """Values in a wider dtype beside the tensors of a program.

    A storage has one flat shadow, and a tensor's shadow is a view of it with the tensor's own strides: views,
    writes in place and what autograd saves need no care.

    Args:
        dtype: fp32 or fp64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._flat: Storages[Tensor] = Storages()

    def follows(self, tensor: object) -> bool:
        """Say whether a value has a shadow: a dense floating-point tensor of at most the shadow's width."""
        return (
            isinstance(tensor, Tensor)
            and type(tensor) in PLAIN  # others hold plain ones, or no memory
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and tensor.element_size() <= self.dtype.itemsize
            and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow, of its shape; one without a shadow gets its own values, exactly."""
        flat = self._flat.get(tensor)
        if flat is None or flat.numel() != tensor.untyped_storage().nbytes() // tensor.element_size():
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            flat = whole.to(self.dtype, copy=True)
            self._flat.set(tensor, flat)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Make values a tensor's shadow."""
        self.of(tensor).copy_(values)

    def reset(self, tensor: Tensor) -> None:
        """Make a tensor's own values its shadow."""
        self.of(tensor).copy_(tensor)

    def widened(self, value: Any) -> Any:
        """Return an argument on the side of the shadow: wide tensors and dtypes, all else as it is."""
        if isinstance(value, Tensor):
            return self.of(value) if self.follows(value) else value
        if isinstance(value, torch.dtype):
            return self.dtype if is_low_precision(value) or value is torch.float32 else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.widened(entry) for entry in value)
        return value

    def exact(self, value: Any) -> Any:
        """Return the same with the program's own values: an op's own error is against these."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if self.follows(value) else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.exact(entry) for entry in value)
        return self.widened(value)
