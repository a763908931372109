"""Gradients that share what they are multiplied by: nothing, or one loss scale.

Being unscaled belongs to gradients, not to an optimizer. Each optimizer owns one group of
parameters; parameters shared by several optimizers form groups of their own, so that what one
owner does to a shared gradient is known to the others. docs/design.md draws the states.

What is asked of a group, always for one of its owners:

- *awaited*: a scaled backward has begun since the owner last stepped or called ``unscale_``, whether it
  reached the group or not; alike on all ranks.
- *pending*: the gradients carry a loss scale, and have changed since the owner last stepped.
- *renewed*: they are not those last unscaled, or that the owner stepped with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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

_JOINER = 0  # in the place of an owner's number: an optimizer that the scaler has not met yet

_ones: dict[tuple[torch.device, int], Tensor] = {}  # of all groups


def _one(device: torch.device) -> Tensor:
    """Return 1 for the current stream, made once; one of a graph's capture or of fake tensors is its own."""
    key = (device, stream_number(device))
    factor = _ones.get(key)
    if factor is None or torch._guards.detect_fake_mode() is not None:
        factor = torch.ones((), dtype=torch.float32, device=device)
        if type(factor) is Tensor and not capturing(device):
            _ones[key] = factor
    return factor


class GradientGroup:
    """The gradients of some parameters, and what they are multiplied by."""

    def __init__(
        self,
        params: list[Tensor],
        owners: frozenset[int],
        carries: LossScale | None = None,
        *,
        remembers: bool = True,
    ) -> None:
        self.params, self.owners, self.carries = params, owners, carries
        self.awaited_owners: frozenset[int] = frozenset()
        self.updates_at_last_use = -1  # requested when an owner last unscaled or stepped
        self._ledger = make_ledger()
        self.taken_away = TakenGradients(params, self._ledger)
        self._remembers = remembers
        self._contributions: list[tuple[LossScale, Tensor]] = []
        # For each owner: what one of them has used may wait for another.
        self._histories = {owner: OverflowHistory() for owner in (*owners, _JOINER)} if remembers else {}
        self._stepped: set[int] = set()  # owners that have stepped since the gradients were last unscaled
        self._measurements: list[Measurement] | None = None
        self._norm_type = 2.0
        self._marked = False

    @property
    def scaled_by(self) -> LossScale | None:
        """The loss scale the gradients are multiplied by; one that no loss was multiplied by yet is none."""
        return None if self.carries is None or self.carries.value is None else self.carries

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return bool(self._ledger.count(self.params) > 0)

    def first_half(self) -> Tensor | None:
        """Return the first parameter with a float16 gradient."""
        position = self._ledger.first_half(self.params)
        return None if position < 0 else self.params[position]

    def is_pending(self, owner: int) -> bool:
        """Whether scaled gradients came in since the last step of ``owner``."""
        return self.carries is not None and self._changed_since(owner)

    def is_renewed(self, owner: int) -> bool:
        """Whether these are other gradients than those that were unscaled, or that ``owner`` stepped with."""
        return self._changed_since(owner) if owner in self._stepped else self.is_new()

    def is_new(self) -> bool:
        """Whether a gradient is in other memory than at the last measurement."""
        return bool(self._ledger.compare(self.params, _MEASURED) == GradientLedger.NEW)

    def counts_as_scaled(self, owner: int, updates: int) -> bool:
        """Whether torch would take the gradients for scaled ones although no scaled backward was seen.

        After ``owner`` has stepped with them and an update, whatever is there is scaled again: a replayed
        graph, ``.data``, NumPy and collectives write without a trace. After ``unscale_`` only new ones are.
        """
        if self.carries is not None or owner in self.awaited_owners or self.updates_at_last_use == updates:
            return False
        return owner in self._stepped or self.is_new()

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

    def _measured(self, norm_type: float, *, write: bool = False) -> list[Measurement]:
        batches = [(batch, self._inverse(batch.device, norm_type)) for batch in self.batches()]
        return [(batch.unscale_ if write else batch.norm_check)(*by) for batch, by in batches]

    def _inverse(self, device: torch.device, norm_type: float) -> tuple[Tensor, float, bool]:
        """Return what kernels multiply by, the norm's order, and whether the first is to be inverted."""
        loss_scale = self.scaled_by
        if loss_scale is None:
            return _one(device), norm_type, False
        scale = loss_scale.require()
        here = scale.device == device
        return scale if here else loss_scale.inverse(device), norm_type, here

    def _remember(self, measurements: list[Measurement], norm_type: float) -> None:
        self._measurements, self._norm_type = measurements, norm_type
        if norm_type >= 0:  # others are zero as soon as one element is
            for history in self._histories.values():
                history.forget_if_zero(measurements)
        self._ledger.remember(self.params, _MEASURED)

    def unscale_(self, norm_type: float = 2.0) -> list[Measurement]:
        """Divide the gradients by the scale they carry, once, and measure them."""
        if self.carries is None:
            return self.measure(norm_type)
        self._stepped.clear()
        self.invalidate_measurement()
        measurements = self._measured(norm_type, write=True)
        self.carries = None
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
                batch.unscale_(moved(factor, batch.device), math.inf).found_inf for batch in self.batches()
            ]
        if before is not None:
            if several_ranks and waited:
                self._contributions.append((before, torch.zeros_like(before.require())))
            elif added:
                self._contributions += [(before, overflow) for overflow in overflows]
        self._ledger.remember(self.params, _CONVERTED)
        self.invalidate_measurement()
        self.carries = loss_scale

    def _forget_dropped(self, *, several_ranks: bool) -> bool:
        """Forget what was found in a batch that was dropped; return whether there are gradients."""
        self.invalidate_measurement()
        histories, present = self._histories.values(), self.has_gradients()
        if present and any(history.found_inf is not None for history in histories):
            measured = self._measured(math.inf)  # setting gradients to zero drops a batch too
            for history in histories:
                history.forget_if_zero(measured)
            dropped = {i for i, param in enumerate(self.params) if param.grad is None}
            self._histories[_JOINER].forget_at(dropped)
        if not present:
            for history in histories:
                history.clear()
            self.taken_away.watch()
            self._contributions = self._contributions if several_ranks else []
        return present

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
        self.taken_away.seen.clear()
        self._contributions.clear()
        for slot in (owner, _JOINER):
            if slot in self._histories:
                self._histories[slot].clear()

    def note_unscaled(self, owner: int) -> None:
        """Record that ``owner`` has unscaled the gradients of the last backward, or stepped with them."""
        self.awaited_owners = self.awaited_owners - {owner}

    def split(self, positions: Sequence[int], owners: frozenset[int]) -> GradientGroup:
        """Return the group of the parameters at ``positions``, with all that is known of their gradients."""
        self.invalidate_measurement()
        params = [self.params[i] for i in positions]
        part = GradientGroup(params, owners, self.carries, remembers=self._remembers)
        if self._histories:
            joiner = self._histories[_JOINER]
            part._histories = {
                owner: self._histories.get(owner, joiner).split(positions) for owner in part._histories
            }
        part._contributions = list(self._contributions)
        joined = owners - self.owners if part.has_gradients() else frozenset()
        part.awaited_owners = (self.awaited_owners & owners) | joined  # a new owner has used nothing yet
        part._stepped = self._stepped & owners
        part.updates_at_last_use = self.updates_at_last_use
        part._marked = self._marked
        part._ledger = self._ledger.split(positions)
        part.taken_away = self.taken_away.split(part.params, part._ledger)
        return part


class TakenGradients:
    """Gradients that hooks take away during a scaled backward, as optimizers offloaded to the CPU do."""

    def __init__(self, params: list[Tensor], ledger: Any) -> None:
        self._params, self._ledger = params, ledger
        self._hooks: list[RemovableHandle] = []
        self.seen: list[Tensor] = []  # reached by a scaled backward, and without a gradient at its end

    def watch(self) -> None:
        """Learn which of the parameters the coming backward passes reach."""
        self.unwatch()
        for param in self._with_taking_hooks():
            note = partial(_note_reached, self.seen, param)
            self._hooks.append(param.register_hook(note))  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        """Remove what :meth:`watch` has put on the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def assume_reached(self) -> None:
        """Assume that a backward before the optimizer was met has reached all of them."""
        self.seen += [param for param in self._with_taking_hooks() if param.grad is None]

    def split(self, params: list[Tensor], ledger: Any) -> TakenGradients:
        """Return what is known of some of the parameters, which their own set watches from now on."""
        self.unwatch()
        part = TakenGradients(params, ledger)
        part.seen = [param for param in self.seen if any(param is own for own in params)]
        return part

    def _with_taking_hooks(self) -> Iterator[Tensor]:
        for position in self._ledger.hooked(self._params):
            param = self._params[position]
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            keep = all(getattr(hook, "keeps_gradients", False) for hook in hooks.values())
            if param.requires_grad and not keep:
                yield param


def _note_reached(seen: list[Tensor], param: Tensor, _: Tensor) -> None:
    """Record, at the end of the backward that has reached it, a parameter that has no gradient then."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: seen.append(param) if param.grad is None else None)
