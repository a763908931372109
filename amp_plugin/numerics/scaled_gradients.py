"""Gradients that overflow fp16: a few passes in a row are how a loss scale is found, many are a fault."""

from __future__ import annotations

from amp_plugin.numerics.origin import Origin

PATIENCE = 20  # backward passes in a row: from 2^16 the scale is below 1 then


class ScaledGradients:
    """Backward passes whose fp16 gradients overflowed, one after the other."""

    def __init__(self) -> None:
        self._task = -1
        self._first: Origin | None = None  # of the passes in a row
        self._in_a_row = 0
        self._overflowed = False

    def enter(self, task: int) -> None:
        """Note that an op runs in a backward pass.

        Args:
            task: the number of the pass.
        """
        if task != self._task:
            if not self._overflowed:
                self._first, self._in_a_row = None, 0
            self._task, self._overflowed = task, False

    def overflow(self, origin: Origin) -> Origin | None:
        """Note an overflow in the present pass; return the first of the row once it is too long."""
        if not self._overflowed:
            self._overflowed, self._in_a_row = True, self._in_a_row + 1
            self._first = self._first or origin
        return self._first if self._in_a_row >= PATIENCE else None

    @property
    def passes(self) -> int:
        """How many passes in a row overflowed, the last one included."""
        return self._in_a_row if self._overflowed else 0

    @property
    def last(self) -> Origin | None:
        """The first overflow of the present row; None if the last pass had none."""
        return self._first if self._overflowed else None
