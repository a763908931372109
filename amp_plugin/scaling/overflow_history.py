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
        for measurement in self._measurements:
            for i, kept in enumerate(joined):
                if kept.positions == measurement.positions and kept.flags.device == measurement.flags.device:
                    joined[i] = kept._replace(flags=kept.flags | measurement.flags)
                    break
            else:
                joined.append(measurement)
        self._measurements = joined

    def measurements(self) -> list[Measurement]:
        """Return what was kept, for the flags of each gradient."""
        return list(self._measurements)

    def forget_if_zero(self, norms: Iterable[Tensor]) -> None:
        """Forget all if the gradients are zero now: who sets them to zero has dropped the batch.

        Args:
            norms: Norms of the present gradients, float32, 0-dim; no host sync.
        """
        if self.found_inf is None:
            return
        device = self.found_inf.device
        dropped = torch.stack([norm.to(device, non_blocking=True) for norm in norms]).eq(0).all()
        self.found_inf = self.found_inf.masked_fill(dropped, 0.0)
        self._measurements = [
            kept._replace(flags=kept.flags.masked_fill(dropped.to(kept.flags.device), 0))
            for kept in self._measurements
        ]

    def split(self, positions: Sequence[int]) -> OverflowHistory:
        """Return what was kept, with the flags of the parameters at ``positions`` only."""
        part = OverflowHistory()
        part.found_inf = self.found_inf
        for kept in self._measurements:
            places = range(len(kept.flags)) if kept.positions is None else kept.positions
            found = {place: i for i, place in enumerate(places)}
            present = [(new, found[old]) for new, old in enumerate(positions) if old in found]
            flags = kept.flags[[i for _, i in present]]
            part._measurements.append(kept._replace(flags=flags, positions=[new for new, _ in present]))
        return part

    def clear(self) -> None:
        """Forget all: the optimizer has stepped, or its gradients are gone."""
        self.found_inf = None
        self._measurements.clear()
