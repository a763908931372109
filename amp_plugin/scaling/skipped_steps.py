"""How many steps were skipped, counted on the device, and whether all of them are."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.step_result import HostFlag

RUN = 50
"""Skipped steps in a row that are worth a warning."""


class SkippedSteps:
    """The count of one optimizer, or of all.

    Attributes:
        count: float32, 0-dim, on the device; None before the first step.
    """

    def __init__(self) -> None:
        self.count: Tensor | None = None
        self._steps = 0
        self._count_then: Tensor | None = None
        self._run: HostFlag | None = None
        self._told = False

    def add(self, found_inf: Tensor) -> None:
        """Count a step, skipped if ``found_inf`` is 1; in place: a captured step adds at each replay."""
        self.count = found_inf.clone() if self.count is None else self.count.add_(found_inf)
        self._steps += 1
        if self._steps % RUN == 0 and not self._told and not capturing(self.count.device):
            new = self.count if self._count_then is None else self.count - self._count_then
            self._run = HostFlag((new >= RUN).float())
            self._count_then = self.count.clone()

    def item(self) -> int:
        """Return the count: a host sync."""
        return 0 if self.count is None else int(self.count.item())

    def all_in_a_row(self) -> bool:
        """Whether :data:`RUN` steps in a row were all skipped; True once, without waiting."""
        if self._told or self._run is None:
            return False
        self._told = bool(self._run.known())
        return self._told


class SkipsByDevice:
    """The count of all optimizers where each decides on the device of its own gradients."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, SkippedSteps] = {}

    def add(self, found_inf: Tensor) -> None:
        """Count a step, skipped if ``found_inf`` is 1."""
        self._counts.setdefault(found_inf.device, SkippedSteps()).add(found_inf)

    def item(self) -> int:
        """Return the count: a host sync for each device."""
        return sum(skipped.item() for skipped in self._counts.values())
