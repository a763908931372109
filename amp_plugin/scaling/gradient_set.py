"""Gradients that share their unit: unscaled, scaled by one loss scale, or left by a fused step.

Being unscaled belongs to gradients, not to an optimizer. Each optimizer owns one set of
parameters; parameters shared by several optimizers form sets of their own, so that what one
owner does to a shared gradient is known to the others. docs/design.md draws the states.

What is asked of a set, always for one of its owners:

- *awaited*: a scaled backward has begun since the owner last stepped or called ``unscale_``, whether it
  reached the set or not; alike on all ranks.
- *pending*: the gradients carry a loss scale, and have changed since the owner last stepped.
- *renewed*: they are others than those last unscaled, or that the owner stepped with.
- *used*: the owner has stepped with them since their unit last changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_plugin.scaling.gradients import GradientBatch, GradientLedger, Measurement, batches_of, make_ledger
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.moves import moved
from amp_plugin.scaling.overflow_history import OverflowHistory
from amp_plugin.scaling.taken_gradients import TakenGradients
from amp_plugin.scaling.units import UNSCALED, LeftByFusedStep, ScaledBy, Unit

# Slots of the ledger; an optimizer's number, from 1 on, is the slot for what it stepped with.
_MEASURED = 0
_BACKWARD = -1  # what was there when a backward began after a measurement
_CONVERTED = -2  # what was there when a loss scale was left for another: was anything added since?


class GradientSet:
    """The gradients of some parameters, and the unit they are in.

    Args:
        params: The parameters.
        owners: Numbers of the optimizers that step them.
        unit: The unit of their gradients.

    Attributes:
        unit: As given; changed by the methods below only.
        awaited_owners: Owners for whom the gradients are awaited.
        taken_away: Gradients that hooks have taken away.
        updates_at_last_use: How many updates had been requested when an owner last unscaled or stepped.
    """

    def __init__(self, params: list[Tensor], owners: frozenset[int], unit: Unit = UNSCALED) -> None:
        self.params = params
        self.owners = owners
        self.unit: Unit = unit
        self._contributions: list[tuple[LossScale, Tensor]] = []
        # Overflows seen before the last measurement, for each owner: what one has used may wait for another.
        self._histories = {owner: OverflowHistory() for owner in owners or (0,)}
        self.awaited_owners: frozenset[int] = frozenset()
        self.updates_at_last_use = -1
        self._used_by: set[int] = set()  # owners that have stepped since the unit last changed
        self._measurements: list[Measurement] | None = None
        self._norm_type = 2.0
        self._marked = False
        self._ledger = make_ledger()
        self.taken_away = TakenGradients(params, self._ledger)

    # -- looking ------------------------------------------------------------------------------

    @property
    def scaled_by(self) -> LossScale | None:
        """The loss scale the gradients are multiplied by; None if they are not, or if only the device knows.

        A scale that no loss was multiplied by yet is none.
        """
        loss_scale = self.unit.loss_scale if isinstance(self.unit, ScaledBy) else None
        return None if loss_scale is None or loss_scale.value is None else loss_scale

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return bool(self._ledger.count(self.params) > 0)

    def first_half(self) -> Tensor | None:
        """Return the first parameter with a float16 gradient."""
        position = self._ledger.first_half(self.params)
        return None if position < 0 else self.params[position]

    def is_pending(self, owner: int) -> bool:
        """Whether scaled gradients came in since the last step of ``owner``."""
        return isinstance(self.unit, ScaledBy) and self._changed_since(owner)

    def is_renewed(self, owner: int) -> bool:
        """Whether the gradients are others than those that were unscaled, or that ``owner`` stepped with."""
        if owner in self._used_by:
            return self._changed_since(owner)
        return bool(self._ledger.compare(self.params, _MEASURED) == GradientLedger.NEW)

    def _changed_since(self, slot: int) -> bool:
        return bool(self._ledger.compare(self.params, slot) > GradientLedger.SAME)

    def is_changed(self) -> bool:
        """Whether a gradient was seen to be written to or replaced since the last measurement."""
        return bool(self._ledger.compare(self.params, _MEASURED) != GradientLedger.SAME)

    def is_changed_unscaled(self) -> bool:
        """Whether there are gradients that changed since the last measurement and carry no loss scale."""
        return self.scaled_by is None and self.has_gradients() and self.is_changed()

    def batches(self) -> list[GradientBatch]:
        """Return the present gradients, ready for the kernels."""
        return batches_of(self._ledger, self.params)

    def earlier_overflow(self, owner: int) -> Tensor | None:
        """Return what was found since the last step of ``owner`` and before the last measurement."""
        return self._histories[owner].found_inf

    def all_measurements(self, owner: int) -> list[Measurement]:
        """Return those since the last step of ``owner``, for their flags."""
        return [*self._histories[owner].measurements(), *(self._measurements or ())]

    # -- measuring ----------------------------------------------------------------------------

    def measure(self, norm_type: float = 2.0) -> list[Measurement]:
        """Measure the gradients; what one call of the scaler has measured already is not read again."""
        if self._measurements is None or norm_type != self._norm_type or self.is_changed():
            self.doubt_measurement()
            self._remember([self._measured(batch, norm_type) for batch in self.batches()], norm_type)
        return self._measurements or []

    def doubt_measurement(self) -> None:
        """Read the gradients again when they are next measured: user code may have written to them.

        No version counter tells of ``.grad.data``, of numpy, or of a collective.
        """
        if self._measurements is not None:
            for history in self._histories.values():
                history.add(self._measurements)
            self._measurements = None

    def _measured(self, batch: GradientBatch, norm_type: float, *, write: bool = False) -> Measurement:
        kernel = batch.unscale_ if write else batch.norm_check
        inverse = self.unit.inverse(batch.device)
        return kernel(inverse.number, norm_type, inverse.is_scale)

    def _remember(self, measurements: list[Measurement], norm_type: float) -> None:
        self._measurements, self._norm_type = measurements, norm_type
        if norm_type >= 0:  # others are zero as soon as one element is
            for history in self._histories.values():
                history.forget_if_zero(measurements)
        self._ledger.remember(self.params, _MEASURED)

    # -- changes of the unit ------------------------------------------------------------------

    def unscale_(self, norm_type: float = 2.0) -> list[Measurement]:
        """Divide the gradients by what they carry, once, and measure them."""
        self._used_by.clear()
        if self.unit is UNSCALED:
            return self.measure(norm_type)
        self.doubt_measurement()
        measurements = [self._measured(batch, norm_type, write=True) for batch in self.batches()]
        self.unit = UNSCALED
        self._remember(measurements, norm_type)
        return measurements

    def convert_for_backward_(self, loss_scale: LossScale, *, several_ranks: bool = False) -> None:
        """Get ready for gradients scaled by ``loss_scale``: bring those that are there to that unit.

        Args:
            loss_scale: The scale of the loss.
            several_ranks: Note which scale was left for this one also without gradients here: other ranks
                may have some.
        """
        waited, self.awaited_owners = bool(self.awaited_owners), self.owners
        present = self.has_gradients()
        if not present:
            self.doubt_measurement()
            for history in self._histories.values():
                history.clear()
            self.taken_away.watch()
            if not several_ranks:
                self._contributions.clear()
        else:
            self._forget_dropped_overflow()
        before = self.scaled_by
        if before is loss_scale:
            return
        overflows: list[Tensor] = []
        added = present and self._changed_since(_CONVERTED)
        if present:
            factor, carried = loss_scale.require(), self.unit.factor()
            overflows = self._convert_(factor if carried is None else factor / carried)
        if before is not None:
            if several_ranks and waited:
                self._contributions.append((before, torch.zeros_like(before.require())))
            elif added:
                self._contributions += [(before, overflow) for overflow in overflows]
        self._ledger.remember(self.params, _CONVERTED)
        self.doubt_measurement()
        self.unit = ScaledBy(loss_scale)
        self._used_by.clear()

    def _convert_(self, factor: Tensor) -> list[Tensor]:
        """Multiply by new/old; returns for each device whether a gradient is not finite, float32, 0-dim."""
        return [batch.unscale_(moved(factor, batch.device), math.inf).found_inf for batch in self.batches()]

    def take_contributions(self) -> list[tuple[LossScale, Tensor]]:
        """Return the other loss scales whose gradients were added, and what overflowed in them; once."""
        contributions, self._contributions = self._contributions, []
        return contributions

    def _forget_dropped_overflow(self) -> None:
        """Forget an overflow whose batch was dropped by setting its gradients to zero.

        Reads the gradients, where they were measured and not stepped with.
        """
        self.doubt_measurement()
        histories = [history for history in self._histories.values() if history.found_inf is not None]
        if histories:
            measured = [self._measured(batch, math.inf) for batch in self.batches()]
            for history in histories:
                history.forget_if_zero(measured)

    def assume_scaled(self, loss_scale: LossScale) -> None:
        """Take the gradients for scaled ones, although no backward was seen to make them."""
        self.unit = ScaledBy(loss_scale)

    def rescale_(self, factor: Tensor) -> None:
        """Follow a change of the loss scale: multiply the gradients by new/old."""
        self._multiply_(factor)

    def leave_to_fused_step(self, scale: Tensor, skipped: Tensor, divisor: Tensor | None = None) -> None:
        """Note that a fused optimizer had the gradients, scaled by ``scale``."""
        self.unit = LeftByFusedStep(scale, skipped, divisor)

    # -- other changes ------------------------------------------------------------------------

    def clip_(self, factor: Tensor, norm_type: float) -> None:
        """Multiply unscaled gradients by a factor of at most 1; their measurement follows."""
        measurements = self.measure(norm_type)
        for batch in self.batches():
            batch.multiply_(moved(factor, batch.device))
        if norm_type != 0:
            measurements = [
                measured._replace(norm=measured.norm * moved(factor, measured.norm.device))
                for measured in measurements
            ]
        self._remember(measurements, norm_type)

    def write_clip_(self, factor: Tensor) -> None:
        """Write a clip into the gradients that was left to a fused optimizer."""
        self._multiply_(factor)

    def _multiply_(self, factor: Tensor) -> None:
        """Multiply by a device-side factor; a change that a user makes is noticed all the same."""
        unchanged = [slot for slot in (_MEASURED, _CONVERTED) if not self._changed_since(slot)]
        for batch in self.batches():
            batch.multiply_(moved(factor, batch.device))
        self.doubt_measurement()
        for slot in unchanged:
            self._ledger.remember(self.params, slot)

    def mark_backward(self) -> None:
        """Note the gradients at the beginning of a backward, for :meth:`grew`."""
        self._ledger.remember(self.params, _BACKWARD)
        self._marked = True

    def grew(self) -> bool:
        """Whether that backward has added to the gradients; asked once."""
        marked, self._marked = self._marked, False
        return marked and self._changed_since(_BACKWARD)

    def note_step(self, owner: int) -> None:
        """Note that ``owner`` has used the gradients."""
        self._ledger.remember(self.params, owner)
        self.note_unscaled(owner)
        self._used_by.add(owner)
        if len(self.owners) > 1:
            self.doubt_measurement()  # the others are to know what it has found
        self._measurements = None
        self.taken_away.seen.clear()
        self._contributions.clear()
        self._histories[owner].clear()

    def note_unscaled(self, owner: int) -> None:
        """Note that ``owner`` has unscaled the gradients of the last backward, or stepped with them."""
        self.awaited_owners = self.awaited_owners - {owner}

    def split(self, positions: Sequence[int], owners: frozenset[int]) -> GradientSet:
        """Return a set of the parameters at ``positions``, with all that is known of their gradients."""
        self.doubt_measurement()
        part = GradientSet([self.params[i] for i in positions], owners, self.unit)
        any_history = next(iter(self._histories.values()))
        part._histories = {
            owner: self._histories.get(owner, any_history).split(positions) for owner in owners or (0,)
        }
        part._contributions = list(self._contributions)
        joined = owners - self.owners if part.has_gradients() else frozenset()
        part.awaited_owners = (self.awaited_owners & owners) | joined  # a new owner has used nothing yet
        part._used_by = self._used_by & owners
        part.updates_at_last_use = self.updates_at_last_use
        part._marked = self._marked
        part._ledger = self._ledger.split(positions)
        part.taken_away = self.taken_away.split(part.params, part._ledger)
        return part
