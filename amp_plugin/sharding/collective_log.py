"""Record what the collectives of a step carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_plugin.precision import short_name

# Names of torch's ops -> ours. The first namespace is what torch.distributed calls, the second DTensor.
_NAMES: Final = {
    "c10d": {
        "_allgather_base_": "all_gather",
        "allgather_": "all_gather",
        "allgather_into_tensor_coalesced_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_": "reduce_scatter",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce",
        "alltoall_": "all_to_all",
        "alltoall_base_": "all_to_all",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "gather_": "gather",
        "scatter_": "scatter",
        "send": "send",
        "recv_": "recv",
    },
    "_c10d_functional": {
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_reduce_": "all_reduce",
        "all_reduce_coalesced": "all_reduce",
        "all_to_all_single": "all_to_all",
        "broadcast": "broadcast",
        "broadcast_": "broadcast",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Collective:
    """One call of a collective.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ...
        dtype: Of what it carries, ``"bf16"`` for example.
        elements: Of the whole, on one rank: what an all-gather returns, what a reduce-scatter takes.
        ranks: In its group.
        bytes: Of the elements.
    """

    op: str
    dtype: str
    elements: int
    ranks: int
    bytes: int


class CollectiveLog:
    """The collectives that ran in a block, in order."""

    def __init__(self, collectives: Iterable[Collective] = ()) -> None:
        self._collectives = list(collectives)

    def append(self, collective: Collective) -> None:
        """Record one more."""
        self._collectives.append(collective)

    def __iter__(self) -> Iterator[Collective]:
        """Iterate over the calls, in order."""
        return iter(self._collectives)

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._collectives)

    def table(self) -> Table:
        """Return a rich table, equal calls in one row."""
        table = Table("collective", "dtype", "elements", "bytes", "ranks", "calls", title="Collectives")
        for call, count in Counter(self._collectives).items():
            cells = (
                call.op,
                call.dtype,
                f"{call.elements:,}",
                f"{call.bytes:,}",
                str(call.ranks),
                str(count),
            )
            table.add_row(*cells)
        return table

    def __repr__(self) -> str:
        """Return how many there are, in words."""
        return f"CollectiveLog({len(self)} collectives)"


@contextmanager
def log_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives of this process in a block, those of a backward pass too.

    Yields:
        The log, filled as they are called; barriers are left out. Nothing waits for a device.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with log_collectives() as log:
        ...     dist.all_reduce(torch.ones(3))
        >>> [(call.op, call.dtype, call.elements) for call in log]
        [('all_reduce', 'fp32', 3)]
        >>> dist.destroy_process_group()
    """
    log = CollectiveLog()
    with _Recorder(log):
        yield log


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees ops below autograd and autocast, where collectives carry what they carry."""

    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective; a DTensor's op comes back as those it is made of."""
        if any(_is_dtensor(kind) for kind in types):
            return NotImplemented
        name = _NAMES.get(getattr(func, "namespace", ""), {}).get(getattr(func, "_opname", ""))
        output = func(*args, **(kwargs or {}))
        if name is not None:
            self._log.append(_collective(name, [*args, *(kwargs or {}).values()], output))
        return output


def _collective(op: str, args: list[Any], output: Any) -> Collective:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    dtype = tensors[0].dtype
    functional = [] if any(_group_in(value) for value in args) else [output]  # else ``args`` hold it too
    elements = max(_total(side) for side in [*args, *functional])
    return Collective(
        op=op,
        dtype=short_name(dtype),
        elements=elements,
        ranks=_group_size(args),
        bytes=elements * dtype.itemsize,
    )


def _total(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _group_in(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _group_size(args: list[Any]) -> int:
    import torch.distributed as dist  # noqa: PLC0415 -- not there in every build of torch

    for value in args:
        if _group_in(value):
            return dist.ProcessGroup.unbox(value).size()
    name = [value for value in args if isinstance(value, str)][-1]  # the last text is the group's
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    size: int = resolve(name).size()
    return size


def _is_dtensor(kind: type) -> bool:
    return kind.__name__ == "DTensor"
