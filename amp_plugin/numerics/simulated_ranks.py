"""Support for several ranks that torch simulates in one process.

In torch's ``LocalTensorMode``, a tensor of type ``LocalTensor`` holds one tensor for each rank. Each op on a
``LocalTensor`` runs once for each rank, and a collective combines the tensors of the ranks. The ops of each
simulated rank therefore look like the ops of a separate process. This module looks up the mode in
``sys.modules``, because a program that uses the mode has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import SymInt, Tensor
from torch.utils._pytree import tree_leaves, tree_map

_MODULE = "torch.distributed._local_tensor"


def simulated_ranks() -> tuple[int, ...]:
    """Return the ranks of the innermost open ``LocalTensorMode``, or an empty tuple outside the mode."""
    module = sys.modules.get(_MODULE)
    mode = None if module is None else module.local_tensor_mode()
    return () if mode is None else tuple(sorted(mode.ranks))


def is_local_tensor(kind: type) -> bool:
    """Return whether a type is torch's ``LocalTensor``."""
    return hasattr(kind, "_local_tensors")


def local_tensors(values: Any) -> Iterator[Mapping[int, Tensor]]:
    """Yield a dict from rank to tensor for each ``LocalTensor`` in nested containers."""
    for leaf in tree_leaves(values):
        if is_local_tensor(type(leaf)):
            yield leaf._local_tensors


def of_rank(values: Any, rank: int | None) -> Any:
    """Return nested values with each ``LocalTensor`` replaced by the tensor of one rank.

    If ``rank`` is None, the values are returned unchanged.
    """

    def leaf_of(leaf: Any) -> Any:
        if is_local_tensor(type(leaf)):
            return leaf._local_tensors[rank]
        if isinstance(leaf, SymInt):  # a size or coordinate that differs between the ranks
            numbers = getattr(leaf.node, "_local_ints", None)
            return int(leaf) if numbers is None else numbers[rank]
        return leaf

    return values if rank is None else tree_map(leaf_of, values)
