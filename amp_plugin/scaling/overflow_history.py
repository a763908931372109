"""Overflows that were seen in gradients since their optimizer last stepped.

A step with a gradient that was not finite is skipped, also if user code has since written over it:
clipping by value turns an infinity into a number, and the step would be as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.moves import moved

_MOST_KEPT = 8  # measurements, before those of the same gradients are joined


class OverflowHistory:
    """Measurements that no longer describe the gradients, kept for what they found.

    Attributes:
        found_inf: 1.0 if one of them found an overflow, float32, 0-dim; None if there are none.
    """

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        self._measurements: list[Measurement] = []

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements that are about to be replaced."""
        for measurement in measurements:
            found = measurement.found_inf
            kept = self.found_inf
            self.found_inf = found if kept is None else torch.maximum(kept, moved(found, kept.device))
            self._measurements.append(measurement)
        if len(self._measurements) > _MOST_KEPT:
            self._join()

    def _join(self) -> None:
        """Make one measurement of those of the same gradients."""
        joined: list[Measurement] = []
        for kept in self._measurements:
            alike = (i for i, other in enumerate(joined) if other.positions == kept.positions)
            i = next((i for i in alike if joined[i].flags.device == kept.flags.device), None)
            if i is None:
                joined.append(kept._replace(flags=kept.flagged(), kept=()))
            else:
                joined[i] = joined[i]._replace(flags=joined[i].flags | kept.flagged())
        self._measurements = joined

    def measurements(self) -> list[Measurement]:
        """Return what was kept, for the flags of each gradient."""
        return list(self._measurements)

    def forget_if_zero(self, measurements: Iterable[Measurement]) -> None:
        """Forget all if the gradients are zero now: setting them to zero drops the batch.

        Args:
            measurements: Of the present gradients; no host sync.
        """
        if self.found_inf is None:
            return
        kept = None
        for measurement in measurements:
            nonzero = moved(measurement.norm.ne(0), self.found_inf.device)
            kept = nonzero if kept is None else kept | nonzero
        if kept is None:
            self.clear()
        else:
            self.found_inf = self.found_inf * kept
            self._measurements = [seen._replace(kept=(*seen.kept, kept)) for seen in self._measurements]

    def split(self, positions: Sequence[int]) -> OverflowHistory:
        """Return what was found in the gradients of the parameters at ``positions``."""
        part = OverflowHistory()
        for kept in self._measurements:
            places = range(len(kept.flags)) if kept.positions is None else kept.positions
            row = {place: i for i, place in enumerate(places)}
            present = [(new, row[old]) for new, old in enumerate(positions) if old in row]
            if present:
                flags = kept.flagged()[[i for _, i in present]]
                found, places = flags.ne(0).any().to(kept.found_inf), [new for new, _ in present]
                part.add([kept._replace(found_inf=found, flags=flags, positions=places, kept=())])
        return part

    def clear(self) -> None:
        """Forget all: the optimizer has stepped, or its gradients are gone."""
        self.found_inf = None
        self._measurements.clear()
