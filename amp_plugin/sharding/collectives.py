"""Record what the collectives of a step carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_plugin.precision import short_name

# The first that is in torch's name counts, underscores aside: ``_allgather_base_``, ``isend``.
_OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
_NAMESPACES: Final = ("c10d", "_c10d_functional")  # of what torch.distributed calls, and DTensor


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


class CollectiveLog(list[Collective]):
    """The collectives that ran in a block, in order."""

    def table(self) -> Table:
        """Return a rich table, equal calls in one row."""
        table = Table("collective", "dtype", "elements", "bytes", "ranks", "calls", title="Collectives")
        for call, count in Counter(self).items():
            sizes = f"{call.elements:,}", f"{call.bytes:,}", str(call.ranks)
            table.add_row(call.op, call.dtype, *sizes, str(count))
        return table


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
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        op = _op_of(func) if getattr(func, "namespace", "") in _NAMESPACES else None
        if op is not None:
            self._log.append(_collective(op, [*args, *(kwargs or {}).values()], output))
        return output


def _op_of(func: Any) -> str | None:
    name = func._opname.replace("_", "")
    return next((op for op in _OPS if op.replace("_", "") in name), None)


def _collective(op: str, args: list[Any], output: Any) -> Collective:
    import torch.distributed as dist  # noqa: PLC0415 -- not there in every build of torch

    groups = [value for value in args if isinstance(value, torch.ScriptObject)]
    groups = [value for value in groups if "ProcessGroup" in str(value._type())]
    if groups:
        group = dist.ProcessGroup.unbox(groups[0])
    else:  # a functional collective: the last text is the group's name, and args do not hold the output
        name = [value for value in args if isinstance(value, str)][-1]
        group = vars(dist.distributed_c10d)["_resolve_process_group"](name)
        args = [*args, output]
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in args]
    dtype = next(leaf.dtype for side in sides for leaf in side)
    elements = max(sum(leaf.numel() for leaf in side) for side in sides)
    total = elements * dtype.itemsize
    return Collective(op=op, dtype=short_name(dtype), elements=elements, ranks=group.size(), bytes=total)
