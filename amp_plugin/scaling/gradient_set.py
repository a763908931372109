"""Gradients that share their unit: scaled by one loss scale, or not scaled.

Being unscaled belongs to gradients, not to an optimizer. Each optimizer owns one set of
parameters; parameters shared by several optimizers form sets of their own, so that what one
owner does to a shared gradient is known to the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amp_plugin.scaling.distributed import Part
from amp_plugin.scaling.gradients import GradientLedger, Group, group_gradients, make_ledger, native_group
from amp_plugin.scaling.loss_scale import LossScale

_MEASURED = 0  # the ledger's slot for the last measurement; optimizers' slots start at 1
_BACKWARD = -1  # the slot for what was there when a backward began after a measurement


class Residue(NamedTuple):
    """What gradients still carry after a folded step: nothing if it was taken, the scale if not.

    Attributes:
        scale: The scale they had, float32, 0-dim.
        skipped: 1.0 if the step was skipped, else 0.0; float32, 0-dim.
    """

    scale: Tensor
    skipped: Tensor

    def factor(self) -> Tensor:
        """Return the factor, float32, 0-dim; worked out only where gradients live on."""
        return torch.where(self.skipped > 0, self.scale, torch.ones_like(self.scale))


class GradientSet:
    """The gradients of some parameters, and the unit they are in.

    Attributes:
        params: The parameters.
        owners: Slots of the optimizers that step them.
        unit: The loss scale the gradients are multiplied by; None if they are unscaled.
        residue: What they may still carry although ``unit`` is None; None means nothing.
        overflow: Overflow seen before gradients were last changed, float32, 0-dim; None if nobody looked.
        overwritten: Measurements that no longer hold, for their flags; joined where they are alike.
        touched: Slots of the owners that have not stepped since the last scaled backward.
        consumed: Slots of the owners that have stepped since gradients last changed unit.
        parts: The last measurement, while it holds; None otherwise.
    """

    def __init__(self, params: list[Tensor], owners: frozenset[int]) -> None:
        self.params = params
        self.owners = owners
        self.unit: LossScale | None = None
        self.residue: Residue | None = None
        self.overflow: Tensor | None = None
        self.overwritten: list[Part] = []
        self.touched: set[int] = set()
        self.consumed: set[int] = set()
        self.parts: list[Part] | None = None
        self._norm_type = 2.0
        self._marked = False
        self._ledger: GradientLedger = make_ledger(params)

    @property
    def ledger(self) -> GradientLedger:
        """The record of which gradients were seen when."""
        return self._ledger

    def groups(self) -> list[Group]:
        """Return the present gradients, ready for the kernels."""
        plain = native_group(self._ledger)
        if plain is not None:
            return [plain]
        return group_gradients(self.params) if self._ledger.count() else []

    def first_of_dtype(self, dtype: torch.dtype) -> int | None:
        """Return the position of the first parameter with a gradient of ``dtype``."""
        if isinstance(self._ledger, GradientLedger):
            return next(
                (i for i, p in enumerate(self.params) if p.grad is not None and p.grad.dtype is dtype), None
            )
        position = self._ledger.first_half() if dtype is torch.float16 else -1
        return None if position < 0 else position

    def measure(self, norm_type: float) -> list[Part]:
        """Measure the gradients in their present unit, without a pass if nothing changed."""
        if self.parts is None or norm_type != self._norm_type or self.changed_since_measured():
            self._keep_overflow()
            self.parts = [
                Part(*group.norm_check(self._inverse(group.device), norm_type), group.positions, group.spread)
                for group in self.groups()
            ]
            self._remember(norm_type)
        return self.parts

    def unscale_(self, norm_type: float) -> list[Part]:
        """Divide the gradients by what they carry, once, and measure them."""
        self.consumed.clear()
        if self.unit is None and self.residue is None:
            return self.measure(norm_type)
        self._keep_overflow()
        self.parts = [
            Part(*group.unscale_(self._inverse(group.device), norm_type), group.positions, group.spread)
            for group in self.groups()
        ]
        self.unit = self.residue = None
        self._remember(norm_type)
        return self.parts

    def clip_(self, factor: Tensor, norm_type: float) -> None:
        """Multiply unscaled gradients by a factor of at most 1; the measurement is carried along."""
        parts = self.measure(norm_type)
        for group in self.groups():
            group.multiply_(factor.to(group.device, non_blocking=True))
        if norm_type != 0:
            parts = [
                part._replace(norm=part.norm * factor.to(part.norm.device, non_blocking=True))
                for part in parts
            ]
        self.parts = parts
        self._remember(norm_type)

    def changed_since_measured(self) -> bool:
        """Whether a gradient was written to or replaced since the last measurement."""
        return self._ledger.compare(_MEASURED) != GradientLedger.SAME

    def _keep_overflow(self) -> None:
        """An overflow that was seen counts, also if someone has overwritten it since."""
        for part in self.parts or ():
            found = part.found_inf
            kept = self.overflow
            self.overflow = (
                found if kept is None else torch.maximum(kept, found.to(kept.device, non_blocking=True))
            )
            self._keep_flags(part)

    def _keep_flags(self, part: Part) -> None:
        for i, kept in enumerate(self.overwritten):
            if kept.positions == part.positions and kept.flags.device == part.flags.device:
                self.overwritten[i] = kept._replace(flags=kept.flags | part.flags)
                return
        self.overwritten.append(part)

    def flagged(self) -> list[Part]:
        """Return all measurements since the last step, for their flags."""
        return [*self.overwritten, *(self.parts or ())]

    def _remember(self, norm_type: float) -> None:
        self._norm_type = norm_type
        self._ledger.remember(_MEASURED)

    def _inverse(self, device: torch.device) -> Tensor:
        if self.unit is not None:
            return self.unit.inverse(device)
        if self.residue is not None:
            return self.residue.factor().reciprocal().to(device, non_blocking=True)
        return torch.ones((), dtype=torch.float32, device=device)

    def begin_backward(self, unit: LossScale) -> None:
        """Get ready for gradients in ``unit``: convert those that are there; free if there are none."""
        self.touched = set(self.owners)
        present = self._ledger.count() > 0
        if not present:
            self.overflow = self.parts = None
            self.overwritten = []
        if self.unit is unit:
            return
        if present:
            factor = unit.require()
            if self.unit is not None:
                factor = factor / self.unit.require()
            elif self.residue is not None:
                factor = factor / self.residue.factor()
            overflow = self.multiply_(factor)
            if self.unit is not None:
                self.unit.record(overflow)
        self.unit, self.residue, self.parts, self.consumed = unit, None, None, set()

    def mark_backward(self) -> None:
        """Note the gradients at the beginning of a backward, for :meth:`grown`."""
        self._ledger.remember(_BACKWARD)
        self._marked = True

    def grown(self) -> bool:
        """Whether that backward has added to the gradients; asked once."""
        marked, self._marked = self._marked, False
        return marked and self._ledger.compare(_BACKWARD) > GradientLedger.SAME

    def multiply_(self, factor: Tensor) -> Tensor:
        """Multiply the gradients by a device-side factor; returns whether a product is not finite."""
        total = torch.zeros((), dtype=torch.float32, device=factor.device)
        for group in self.groups():
            found = group.multiply_(factor.to(group.device, non_blocking=True))
            total = torch.maximum(total, found.to(factor.device, non_blocking=True))
        self._keep_overflow()
        self.parts = None
        return total

    def pending(self, slot: int) -> bool:
        """Whether scaled gradients came in since the last step of the owner with ``slot``."""
        return self.unit is not None and self._ledger.compare(slot) > GradientLedger.SAME

    def renewed(self, slot: int) -> bool:
        """Whether the gradients are others than those that were unscaled or stepped."""
        if slot in self.consumed:
            return self._ledger.compare(slot) > GradientLedger.SAME
        return self._ledger.compare(_MEASURED) == GradientLedger.NEW

    def stepped(self, slot: int) -> None:
        """Note that the owner with ``slot`` has used the gradients."""
        self._ledger.remember(slot)
        self.touched.discard(slot)
        self.consumed.add(slot)
        self.overflow = self.parts = None
        self.overwritten = []

    def split(self, params: list[Tensor], owners: frozenset[int]) -> GradientSet:
        """Return a set of some of these parameters, in the same unit."""
        part = GradientSet(params, owners)
        part.unit, part.residue, part.overflow = self.unit, self.residue, self.overflow
        part.touched = set(owners) if self.touched else set()
        return part
