"""How a gradient is sharded over ranks, read from its DTensor placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardLayout(NamedTuple):
    """Which ranks hold which parts of a gradient.

    Attributes:
        mesh: The device mesh.
        sharded: For each mesh dimension, whether ranks along it hold different elements.
    """

    mesh: DeviceMesh
    sharded: tuple[bool, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Any]) -> ShardLayout:
        """Read a DTensor's; FSDP2 over tensor parallelism has kinds of placements of its own."""
        return cls(mesh, tuple(not (kind.is_replicate() or kind.is_partial()) for kind in placements))

    def replicas(self) -> int:
        """Return how many ranks hold the same elements."""
        sizes = (self.mesh.size(dim) for dim, sharded in enumerate(self.sharded) if not sharded)
        return math.prod(sizes)


def local_gradient(param: Tensor) -> tuple[Tensor, ShardLayout | None]:
    """Return this rank's part of ``param.grad``, and the layout of the whole.

    A Partial gradient is summed up first and replaced: neither its norm nor its overflow
    can be told from the summands.
    """
    grad: Any = param.grad
    if not _is_dtensor(grad):
        return grad, None
    if is_partial(grad.placements):
        from torch.distributed.tensor import Replicate  # noqa: PLC0415 -- only DTensor users pay for it

        whole = [Replicate() if p.is_partial() else p for p in grad.placements]
        grad = param.grad = grad.redistribute(placements=whole)
    local = grad._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    return local, ShardLayout.of(grad.device_mesh, grad.placements)


def is_partial(placements: Sequence[Any]) -> bool:
    """Whether ranks hold summands of a DTensor's elements."""
    return any(placement.is_partial() for placement in placements)


def _is_dtensor(grad: Tensor) -> bool:
    if type(grad) in {Tensor, torch.nn.Parameter} or not torch.distributed.is_available():
        return False
    return isinstance(grad, _dtensor())


@cache
def _dtensor() -> type[Tensor]:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- only tensor subclasses pay for it

    return DTensor


def parameter_layouts(params: Sequence[Tensor]) -> tuple[ShardLayout, ...]:
    """Return every layout that the gradients of ``params`` may have, in a fixed order.

    Every rank finds the same list, whatever gradients it has.
    """
    found: dict[ShardLayout, None] = {}
    for param in params:
        if _is_dtensor(param):
            tensor: Any = param
            found[ShardLayout.of(tensor.device_mesh, tensor.placements)] = None
    return tuple(found)
