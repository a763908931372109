"""Overflows that were seen in gradients since their optimizer last stepped.

A step with a gradient that was not finite is skipped, also if somebody has since written over it:
clipping by value turns an infinity into a number, and the step would be as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from amp_plugin.scaling.gradients import Measurement

_MOST_KEPT = 8  # measurements, before those of the same gradients are joined


class OverflowHistory:
    """Measurements that no longer describe the gradients, kept for what they found.

    Attributes:
        found_inf: 1.0 if one of them found an overflow, float32, 0-dim; None if there are none.
    """

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        self._measurements: list[Measurement] = []
        self._kept: list[tuple[int, Tensor]] = []  # of so many measurements: False if they were forgotten

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements that are about to be replaced."""
        for measurement in measurements:
            found = measurement.found_inf
            kept = self.found_inf
            self.found_inf = (
                found if kept is None else torch.maximum(kept, found.to(kept.device, non_blocking=True))
            )
            self._measurements.append(measurement)
        if len(self._measurements) > _MOST_KEPT:
            self._join()

    def _join(self) -> None:
        """Make one measurement of those of the same gradients."""
        joined: list[Measurement] = []
        for measurement in self.measurements():
            for i, kept in enumerate(joined):
                if kept.positions == measurement.positions and kept.flags.device == measurement.flags.device:
                    joined[i] = kept._replace(flags=kept.flags | measurement.flags)
                    break
            else:
                joined.append(measurement)
        self._measurements = joined

    def measurements(self) -> list[Measurement]:
        """Return what was kept, for the flags of each gradient."""
        for count, kept in self._kept:
            for i, measurement in enumerate(self._measurements[:count]):
                flags = measurement.flags * kept.to(measurement.flags.device)
                self._measurements[i] = measurement._replace(flags=flags)
        self._kept.clear()
        return list(self._measurements)

    def forget_if_zero(self, norms: Iterable[Tensor]) -> None:
        """Forget all if the gradients are zero now: who sets them to zero has dropped the batch.

        Args:
            norms: Norms of the present gradients, float32, 0-dim; no host sync.
        """
        if self.found_inf is None:
            return
        kept = None
        for norm in norms:
            nonzero = norm.ne(0).to(self.found_inf.device, non_blocking=True)
            kept = nonzero if kept is None else kept | nonzero
        if kept is not None:
            self.found_inf = self.found_inf * kept
            self._kept.append((len(self._measurements), kept))

    def split(self, positions: Sequence[int]) -> OverflowHistory:
        """Return what was found in the gradients of the parameters at ``positions``."""
        part = OverflowHistory()
        for kept in self.measurements():
            places = range(len(kept.flags)) if kept.positions is None else kept.positions
            row = {place: i for i, place in enumerate(places)}
            present = [(new, row[old]) for new, old in enumerate(positions) if old in row]
            if present:
                flags = kept.flags[[i for _, i in present]]
                found = flags.ne(0).any().to(kept.found_inf)
                part.add([kept._replace(found_inf=found, flags=flags, positions=[new for new, _ in present])])
        return part

    def clear(self) -> None:
        """Forget all: the optimizer has stepped, or its gradients are gone."""
        self.found_inf = None
        self._measurements.clear()
        self._kept.clear()
