"""Gradients that overflow fp16: a few passes in a row are how a loss scale is found, many are a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_plugin.numerics.origin import Origin

PATIENCE = 20  # backward passes in a row: from 2^16 the scale is below 1 then


class ScaledGradients:
    """Backward passes whose fp16 gradients overflowed, one after the other."""

    def __init__(self) -> None:
        self._task = -1
        self._first: Origin | None = None  # of the passes in a row
        self._in_a_row = 0
        self._overflowed = False
        self._suspect: Origin | None = None  # made in this pass; what comes of it is not known yet

    def enter(self, task: int, alive: Callable[[], Sequence[Origin]]) -> None:
        """Note that an op runs in a backward pass.

        Args:
            task: the number of the pass.
            alive: returns the origins of numbers that are not finite and still there.
        """
        if task != self._task:
            self.close(alive)
            if not self._overflowed:
                self._first, self._in_a_row = None, 0
            self._task, self._overflowed = task, False

    def suspect(self, origin: Origin) -> None:
        """Note numbers that may vanish again before they reach a gradient, as a divisor does."""
        self._suspect = self._suspect or origin

    def close(self, alive: Callable[[], Sequence[Origin]]) -> None:
        """End the present pass: what is still there then is a gradient that autograd.grad returned."""
        suspect, self._suspect = self._suspect, None
        if suspect is not None and not self._overflowed and suspect in alive():
            self.overflow(suspect)

    def overflow(self, origin: Origin) -> Origin | None:
        """Note that an overflow reached a gradient; return the first of the row once it is too long."""
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
