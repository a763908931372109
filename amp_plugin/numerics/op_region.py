"""The region of a program in which a dispatch mode sees every op."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

import torch
from typing_extensions import Self

from amp_plugin.casting.dispatcher import KERNELS
from amp_plugin.numerics.op_mode import OpMode


class Follower(Protocol):
    """What follows a program by hooks of its own, between open and close."""

    def open(self) -> None:
        """Place the hooks."""

    def close(self) -> None:
        """Remove them."""


class OpRegion:
    """A region whose ops go through a dispatch mode; compiled functions run eagerly in it.

    Args:
        mode: the dispatch mode.
        *followers: opened before it, closed after it, as its module paths are.
    """

    def __init__(self, mode: OpMode, *followers: Follower) -> None:
        self._mode = mode
        self._followers = followers
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open the region."""
        KERNELS.install()
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for follower in (*self._followers, self._mode.modules):
                follower.open()
                stack.callback(follower.close)
            stack.enter_context(self._mode)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region."""
        self._open.close()
