"""Unscaling: groups of gradients that are multiplied by nothing, or by one loss scale.

Being unscaled belongs to gradients, not to an optimizer. Parameters shared by several optimizers form groups
of their own, so that each owner knows what another has done. docs/design.md draws and names the states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from amp_plugin.scaling.gradients import (
    GradientBatch,
    GradientLedger,
    Measurement,
    OverflowHistory,
    batches_of,
    make_ledger,
)
from amp_plugin.scaling.loss_scale import LossScale, capturing, moved, stream_number

# Slots of the ledger; an optimizer's number, from 1 on, is the slot for what it stepped with.
_MEASURED = 0
_BACKWARD = -1  # what was there when a backward began after a measurement
_CONVERTED = -2  # what was there when a loss scale was left for another: was anything added since?


@cache
def _one(device: torch.device, stream: int) -> Tensor:
    """Return 1 for a stream of a device, made once."""
    del stream
    return torch.ones((), dtype=torch.float32, device=device)


class GradientGroup:
    """The gradients of some parameters, and what they are multiplied by."""

    def __init__(
        self,
        params: list[Tensor],
        owners: frozenset[int],
        unit: LossScale | None = None,  # the loss scale that they count as multiplied by; None: unscaled
        *,
        remembers: bool = True,
    ) -> None:
        self.params, self.owners, self.unit = params, owners, unit
        self.awaited_owners: frozenset[int] = frozenset()
        self.updates_at_last_use = -1  # requested when an owner last unscaled or stepped
        self._ledger = make_ledger()
        self.taken_away: list[Tensor] = []  # their gradients were gone at the end of a scaled backward
        self._watched: set[Tensor] = set()  # for that
        self._contributions: list[tuple[LossScale, Tensor]] = []
        # For each owner, since gradients that one has used may still wait for another.
        self._histories = {owner: OverflowHistory() for owner in owners} if remembers else {}
        self._stepped: set[int] = set()  # owners that have stepped since the gradients were last unscaled
        self._measurements: list[Measurement] | None = None
        self._norm_type = 2.0
        self._marked = False

    @property
    def scaled_by(self) -> LossScale | None:
        """The loss scale the gradients are multiplied by; None until a loss was multiplied by it."""
        return None if self.unit is None or self.unit.value is None else self.unit

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return bool(self._ledger.count(self.params) > 0)

    def first_float16(self) -> Tensor | None:
        """Return the first parameter with a float16 gradient."""
        position = self._ledger.first_float16(self.params)
        return None if position < 0 else self.params[position]

    def is_pending(self, owner: int) -> bool:
        """Whether scaled gradients came in since the last step of ``owner``."""
        return self.unit is not None and self._changed_since(owner)

    def is_renewed(self, owner: int) -> bool:
        """Whether these are other gradients than those that were unscaled, or that ``owner`` stepped with."""
        return self._changed_since(owner) if owner in self._stepped else self.is_new()

    def is_new(self) -> bool:
        """Whether a gradient is in other memory than at the last measurement."""
        return bool(self._ledger.compare(self.params, _MEASURED) == GradientLedger.NEW)

    def count_as_scaled(self, owner: int, updates: int, unit: LossScale) -> None:
        """Take the gradients for scaled ones where torch would, although no scaled backward was seen.

        After ``owner`` has stepped with them and an update, whatever is there is scaled again: a replayed
        graph, ``.data``, NumPy and collectives write without a trace. After ``unscale_`` only new ones are.
        """
        if self.unit is not None or owner in self.awaited_owners or self.updates_at_last_use == updates:
            return
        if owner in self._stepped or self.is_new():
            self.unit = unit
            self._histories = {owner: OverflowHistory() for owner in self.owners}  # of a batch that is gone

    def _changed_since(self, slot: int) -> bool:
        return bool(self._ledger.compare(self.params, slot) > GradientLedger.SAME)

    def is_changed(self) -> bool:
        """Whether a gradient was seen to be written to or replaced since the last measurement."""
        return bool(self._ledger.compare(self.params, _MEASURED) != GradientLedger.SAME)

    def batches(self) -> list[GradientBatch]:
        """Return the present gradients, ready for the kernels."""
        return batches_of(self._ledger, self.params)

    def found_before(self, owner: int) -> OverflowHistory:
        """Return what was found since the last step of ``owner`` and before the last measurement."""
        return self._histories.get(owner) or OverflowHistory()

    def all_measurements(self, owner: int) -> list[Measurement]:
        """Return those since the last step of ``owner``, for their flags."""
        return [*self.found_before(owner).measurements, *(self._measurements or ())]

    def measure(self, norm_type: float = 2.0) -> list[Measurement]:
        """Measure the gradients; what one call of the scaler has measured already is not read again."""
        if self._measurements is None or norm_type != self._norm_type or self.is_changed():
            self.invalidate_measurement()
            self._remember(self._measured(norm_type), norm_type)
        return self._measurements or []

    def invalidate_measurement(self) -> None:
        """Read the gradients again when next measured: ``.grad.data`` and NumPy write without a version."""
        if self._measurements is not None:
            for history in self._histories.values():
                history.add(self._measurements)
            self._measurements = None

    def note_written(self) -> None:
        """Take the gradients, which a clip has written in place, for those last measured; read them again."""
        self.invalidate_measurement()
        self._ledger.remember(self.params, _MEASURED)

    def _measured(self, norm_type: float, *, write: bool = False) -> list[Measurement]:
        measurements = []
        for batch in self.batches():
            factor, divide = self._factor(batch.device)
            measurements.append(batch.measure(factor, norm_type, divide=divide, write=write))
        return measurements

    def _factor(self, device: torch.device) -> tuple[Tensor, bool]:
        """Return what unscales on ``device``, and whether it divides."""
        if self.scaled_by is None:
            # One of a graph's capture or of fake tensors is its own.
            own = capturing(device) or torch._guards.detect_fake_mode() is not None
            return (_one.__wrapped__ if own else _one)(device, stream_number(device)), False
        scale = self.scaled_by.require()
        here = scale.device == device
        return scale if here else self.scaled_by.snapshot(device, inverse=True), here

    def _remember(self, measurements: list[Measurement], norm_type: float) -> None:
        self._measurements, self._norm_type = measurements, norm_type
        if norm_type >= 0:  # others are zero as soon as one element is
            for history in self._histories.values():
                history.forget_if_zero(measurements)
        self._ledger.remember(self.params, _MEASURED)

    def unscale_(self, norm_type: float = 2.0) -> list[Measurement]:
        """Divide the gradients by the scale they carry, once, and measure them."""
        if self.unit is None:
            return self.measure(norm_type)
        self._stepped.clear()
        self.invalidate_measurement()
        measurements = self._measured(norm_type, write=True)
        self.unit = None
        self._remember(measurements, norm_type)
        return measurements

    def convert_for_backward_(self, loss_scale: LossScale, *, several_ranks: bool = False) -> None:
        """Get ready for gradients scaled by ``loss_scale``: bring those that are there to that scale."""
        waited, self.awaited_owners = bool(self.awaited_owners), self.owners
        self._stepped.clear()
        present = self._forget_dropped(several_ranks=several_ranks)
        before = self.scaled_by
        if before is loss_scale:
            return
        overflows: list[Tensor] = []
        added = present and self._changed_since(_CONVERTED)
        if present:
            factor = loss_scale.require()
            factor = factor if before is None else factor / before.require()
            overflows = [
                batch.measure(moved(factor, batch.device), math.inf, write=True).found_inf
                for batch in self.batches()
            ]
        if before is not None:
            if several_ranks and waited:
                self._contributions.append((before, torch.zeros_like(before.require())))
            elif added:
                self._contributions += [(before, overflow) for overflow in overflows]
        self._ledger.remember(self.params, _CONVERTED)
        self.invalidate_measurement()
        self.unit = loss_scale

    def _forget_dropped(self, *, several_ranks: bool) -> bool:
        """Forget what was found in a batch that was dropped; return whether there are gradients."""
        self.invalidate_measurement()
        histories, present = self._histories.values(), self.has_gradients()
        if present and any(history.found_inf is not None for history in histories):
            measured = self._measured(math.inf)  # setting gradients to zero drops a batch too
            for history in histories:
                history.forget_if_zero(measured)
        if not present:
            for history in histories:
                history.clear()
            self._watch_taking_hooks()
            self._contributions = self._contributions if several_ranks else []
        return present

    def _watch_taking_hooks(self) -> None:
        """Learn whose gradients hooks take away in backward, as optimizers offloaded to the CPU do."""
        for param in self._with_taking_hooks():
            if param not in self._watched:
                self._watched.add(param)
                note = partial(_note_taken, self.taken_away, param)
                param.register_hook(note)  # type: ignore[no-untyped-call]

    def assume_taken(self) -> None:
        """Assume that a backward before the optimizer was met has reached all parameters with such hooks."""
        self.taken_away += [param for param in self._with_taking_hooks() if param.grad is None]

    def _with_taking_hooks(self) -> Iterator[Tensor]:
        for position in self._ledger.hooked(self.params):
            param = self.params[position]
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            keep = all(getattr(hook, "keeps_gradients", False) for hook in hooks.values())
            if param.requires_grad and not keep:
                yield param

    def take_contributions(self) -> list[tuple[LossScale, Tensor]]:
        """Return the other loss scales whose gradients were added, and what overflowed in them; once."""
        contributions, self._contributions = self._contributions, []
        return contributions

    def clip_(self, factor: Tensor, norm_type: float) -> None:
        """Multiply unscaled gradients by a factor of at most 1; their measurement follows."""
        measurements = self.measure(norm_type)
        for batch in self.batches():
            batch.multiply_(moved(factor, batch.device))
        if norm_type != 0:
            measurements = [m._replace(norm=m.norm * moved(factor, m.norm.device)) for m in measurements]
        self._remember(measurements, norm_type)

    def multiply_(self, factor: Tensor) -> None:
        """Multiply by a number on the device (0-dim); a change that a user makes is noticed all the same."""
        unchanged = [slot for slot in (_MEASURED, _CONVERTED) if not self._changed_since(slot)]
        for batch in self.batches():
            batch.multiply_(moved(factor, batch.device))
        self.invalidate_measurement()
        for slot in unchanged:
            self._ledger.remember(self.params, slot)

    def mark_backward(self) -> None:
        """Record the gradients at the beginning of a backward, for :meth:`grew`."""
        self._ledger.remember(self.params, _BACKWARD)
        self._marked = True

    def grew(self) -> bool:
        """Whether that backward has added to the gradients; asked once."""
        marked, self._marked = self._marked, False
        return marked and self._changed_since(_BACKWARD)

    def note_step(self, owner: int) -> None:
        """Record that ``owner`` has used the gradients."""
        self._ledger.remember(self.params, owner)
        self.note_unscaled(owner)
        self._stepped.add(owner)
        if len(self.owners) > 1:
            self.invalidate_measurement()  # the others are to know what it has found
        self._measurements = None
        self.taken_away.clear()
        self._contributions.clear()
        if owner in self._histories:
            self._histories[owner].clear()

    def note_unscaled(self, owner: int) -> None:
        """Record that ``owner`` has unscaled the gradients of the last backward, or stepped with them."""
        self.awaited_owners = self.awaited_owners - {owner}

    def split(self, positions: Sequence[int], owners: frozenset[int]) -> GradientGroup:
        """Return the group of the parameters at ``positions``, with all that is known of their gradients."""
        self.invalidate_measurement()
        params = [self.params[i] for i in positions]
        part = GradientGroup(params, owners, self.unit, remembers=bool(self._histories))
        if self._histories:
            first = next(iter(self._histories.values()))  # what a new owner takes over
            part._histories = {owner: self._histories.get(owner, first).split(positions) for owner in owners}
        part._contributions = list(self._contributions)
        joined = owners - self.owners if part.has_gradients() else frozenset()
        part.awaited_owners = (self.awaited_owners & owners) | joined  # a new owner has used nothing yet
        part._stepped = self._stepped & owners
        part.updates_at_last_use = self.updates_at_last_use
        part._marked = self._marked
        part._ledger = self._ledger.split(positions)
        part.taken_away = [param for param in self.taken_away if any(param is own for own in params)]
        return part


def _note_taken(taken_away: list[Tensor], param: Tensor, _: Tensor) -> None:
    """Record, at the end of the backward that has reached it, a parameter that has no gradient then."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: taken_away.append(param) if param.grad is None else None)
