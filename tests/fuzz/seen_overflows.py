"""Overflows that the scaler has looked at: they count, also if somebody writes over them."""

from __future__ import annotations

from collections.abc import Container, Iterable

NO, MAYBE, YES = "no", "maybe", "yes"


class SeenOverflows:
    """For an optimizer and a parameter: whether an overflow was seen since the optimizer's last step.

    MAYBE where it is open whether it still counts.
    """

    def __init__(self) -> None:
        self._levels: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()  # those that an update has followed

    def see(self, o: int, index: int, level: str) -> None:
        """A gradient that is not finite was looked at."""
        self._levels[o, index] = YES if YES in (level, self._levels.get((o, index))) else MAYBE
        self._told.discard((o, index))

    def join(self, o: int, index: int, owners: Iterable[int]) -> None:
        """A parameter joins an optimizer: what its owners must skip for, the new one must too."""
        levels = {self._levels.get((owner, index), NO) for owner in owners}
        if levels - {NO}:
            self.see(o, index, YES if levels == {YES} else MAYBE)

    def skips(self, o: int, indices: Iterable[int]) -> set[bool]:
        """The answers allowed: whether the optimizer's step must be skipped."""
        levels = {self._levels.get((o, index)) for index in indices}
        return {True} if YES in levels else {True, False} if MAYBE in levels else {False}

    def doubt(self, index: int, *, dropped: bool = True) -> None:
        """A gradient is zero or gone: its overflow counts no more, at the latest after an update.

        Unless the others of its optimizers are not zero (``dropped`` is False): who writes zeros over one gradient
        has dropped no batch.
        """
        for key in [key for key in self._levels if key[1] == index]:
            self._levels[key] = MAYBE
            if dropped and key in self._told:
                del self._levels[key]

    def update(self) -> None:
        """An update was requested: from now on it may be forgotten."""
        self._levels = dict.fromkeys(self._levels, MAYBE)

    def tell(self, dropped: Container[int]) -> None:
        """An update was applied: overflows whose gradients were dropped are forgotten."""
        self._levels = {key: level for key, level in self._levels.items() if key[1] not in dropped}
        self._told |= set(self._levels)

    def step(self, o: int, indices: Iterable[int]) -> None:
        """An optimizer has stepped: it starts anew, and for others that share a gradient it is open."""
        for index in indices:
            self._levels.pop((o, index), None)
            for key in [key for key in self._levels if key[1] == index]:
                self._levels[key] = MAYBE

    def forget(self, o: int) -> None:
        """All gradients of an optimizer were gone when a backward began."""
        self._levels = {key: level for key, level in self._levels.items() if key[0] != o}

    def clear(self) -> None:
        """Forget everything."""
        self._levels.clear()
        self._told.clear()
