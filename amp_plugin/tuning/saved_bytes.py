"""Count the bytes that forward passes save for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import Self

from amp_plugin.numerics.values import Storages, storage_address


class SavedBytes:
    """A region that counts what autograd keeps; each storage once while it lives.

    Parameters are left out: they are there anyway. Casts of them count, they live because they are saved.
    What a recomputation saves inside a backward pass is left out, too.

    Attributes:
        total: bytes, over all forward passes in the region.
    """

    def __init__(self) -> None:
        self.total = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._seen: Storages[bool] = Storages()

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hooks.__exit__(*exc_info)

    def _pack(self, tensor: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        base = tensor._base if tensor._base is not None else tensor
        if in_backward or isinstance(base, nn.Parameter) or not storage_address(tensor):
            return tensor
        if self._seen.get(tensor) is None:
            self._seen.set(tensor, True)
            self.total += tensor.untyped_storage().nbytes()
        return tensor
