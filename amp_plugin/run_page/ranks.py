"""What other ranks have found, handed to rank 0 through the process group's store; none waits for another."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed

from amp_plugin.run_page.history import Look

_pages = itertools.count()  # every rank makes its pages in the same order


def ranks() -> int:
    """Return how many processes train together."""
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


class OtherRanks:
    """The looks of the ranks that write no page."""

    def __init__(self) -> None:
        self._name = f"amp_plugin/page/{next(_pages)}"

    def send(self, looks: Sequence[Look]) -> None:
        """Leave what this rank has found so far where rank 0 finds it."""
        if ranks() > 1:
            _store().set(f"{self._name}/{distributed.get_rank()}", pickle.dumps(tuple(looks)))

    def received(self) -> Iterator[Look]:
        """Return what the others have left by now."""
        for rank in range(1, ranks()):
            key = f"{self._name}/{rank}"
            if _store().check([key]):
                yield from pickle.loads(_store().get(key))  # noqa: S301 -- a rank of this run wrote it


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415 -- absent in some builds

    return _get_default_store()
