"""Which op of the forward pass a node of the backward pass belongs to."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from amp_plugin.numerics.places import CalledFrom, called_from

_MOST = 500_000  # sites kept; a node this old has long run its backward


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op ran.

    Attributes:
        op: full name.
        module: path of the module; empty outside of modules.
        where: the line that called it.
        in_block: whether an autocast block was open around it.
    """

    op: str
    module: str
    where: CalledFrom
    in_block: bool = False


def in_autocast_block() -> bool:
    """Say whether this thread is in an autocast block; inside an op autocast's own flag is off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def runs_backward(node: Any) -> bool:
    """Say whether a backward pass runs an op; what checkpoint computes again belongs to the forward pass.

    Args:
        node: the autograd node that runs it; None if there is none.
    """
    return node is not None and not torch.is_grad_enabled()


class ForwardSites:
    """The site of each op that autograd recorded, by the number that its node got.

    Numbers are counted in each thread, so that of another thread's node may be ambiguous: then none is found.
    """

    def __init__(self) -> None:
        self._sites: dict[tuple[int, int], Site] = {}  # (thread, number) -> site
        self._before: dict[int, int] = {}  # thread -> the last number that is not ours to name

    def open(self) -> None:
        """Begin with the nodes that this thread makes from now on."""
        self._before[threading.get_ident()] = torch._C._autograd._get_sequence_nr() - 1

    def note(self, op: str, module: str) -> None:
        """Note the op that runs, if autograd has just made a node for it."""
        number = torch._C._autograd._get_sequence_nr() - 1
        key = (threading.get_ident(), number)
        if key in self._sites or number <= self._before.setdefault(key[0], number):
            return
        self._sites[key] = Site(op, module, called_from(), in_autocast_block())
        if len(self._sites) > _MOST:
            for old in list(self._sites)[: _MOST // 2]:
                del self._sites[old]

    def latest(self, site: Site) -> Site | None:
        """Return what was noted of the op that runs; None if autograd has made no node for it.

        Args:
            site: where it runs.
        """
        noted = self._sites.get((threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1))
        return noted if noted == site else None

    def of(self, node: Any) -> Site | None:
        """Return where the forward op of a node ran; None if that is not known.

        Args:
            node: an autograd node, or None.
        """
        if node is None:
            return None
        number = node._sequence_nr()
        found = [self._sites[thread, number] for thread in self._before if (thread, number) in self._sites]
        return found[0] if len(found) == 1 else None
