"""The ledger records, for each parameter, which loss scale its gradient is multiplied by.

A gradient *carries* the loss scale that it is multiplied by. An unscaled gradient carries nothing. A record
belongs to a parameter and not to an optimizer, so optimizers that share a parameter share its record. Only
the ledger changes a record. To *use* a gradient is to unscale it with ``unscale_``, to clip it, or to step
with it. Five events change a record. The table shows what happens to an unscaled gradient, and to a gradient
that carries the loss scale S:

=================================== =================== ============================== ==================
event                               unscaled gradient   gradient that carries S        method
=================================== =================== ============================== ==================
a backward pass of scale T begins   multiplied by T     multiplied by T/S              ``begin_backward``
a use, other than the next one      unchanged           divided by S                   ``carry_nothing``
a step that divides in its kernel   unchanged           divided by S in the kernel     ``carry_nothing``
S takes a new value                 unchanged           multiplied by new/old          ``write``
used again after step and update    assumed to carry S  unchanged                      ``assume_scaled``
=================================== =================== ============================== ==================

First :mod:`amp_plugin.scaling.optimizer_state` multiplies or divides the gradients, and then the ledger
changes the records. ``begin_backward`` records that gradients are multiplied by the loss scale T, and
``carry_nothing`` records that gradients are unscaled. These sentences complete the table:

- A record refers to a LossScale object S, not to a number. A gradient is divided by the value that S has at
  the time of the division.
- When a scaled backward pass begins, the gradients of all optimizers are rescaled to the loss scale of that
  pass, including gradients that the pass does not reach.
- If a backward pass runs after ``unscale_`` but before the step and ``update()``, the gradients of that
  optimizer are unscaled again when the pass ends.
- ``update()`` is a request. The LossScale S takes its new value once ``waits()`` is False for every
  optimizer, or at the latest just before the next loss is scaled. If there are several optimizers, an
  optimizer whose gradients were unscaled by ``unscale_`` or a clip must also step first.
- If a gradient overflows, the next update lowers the loss scale of every loss that contributed to the
  gradient.
- The last row of the table, ``assume_scaled``, applies if, after ``step()`` and ``update()``, an optimizer's
  gradients are used again although no scaled backward pass has run in between. Writes through ``.data``,
  NumPy or a collective do not change a gradient's version counter. Therefore, after the optimizer has
  stepped, its gradients are assumed to be scaled even if their version counters have not changed. If
  ``unscale_`` was called for the optimizer but the optimizer has not stepped, a gradient is assumed to be
  unscaled, unless its address has changed.
- A program may set the stage of an optimizer in ``scaler._per_optimizer_states`` to READY, or remove the
  optimizer's entry. The optimizer's gradients are then assumed to be scaled, as in the last row of the table.
  The gradients are also assumed to be scaled if a scaled backward pass begins before the optimizer uses them.

The ledger also records whether a gradient has been changed, by a backward pass or by the user's code. Each
time the ledger looks at a gradient, it records the gradient's address and version counter, to compare them
later::

    waits()       Is there a scaled gradient that no optimizer has used since a backward pass added to it?
    has_grown()   Has a backward pass added to a gradient since its last use?
    is_changed()  Was a gradient written to, replaced or set to None since it was last recorded?

The native core has a faster class in C++ that does the same (``csrc/python/gradient_ledger.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_plugin.kernels.build import native_core

if TYPE_CHECKING:
    from amp_plugin.scaling.loss_scale import LossScale

# A weak reference to a gradient's storage, the gradient's address (with offset) and its version counter.
_Seen = tuple[Any, Any, int] | None


@dataclass(eq=False, slots=True)
class Record:
    """The record of one parameter's gradient."""

    carries: LossScale | None
    seen: _Seen = None
    # The number of updates that had been requested when an optimizer last used the gradient.
    used_at: int = -1
    # Each key identifies an optimizer that has used the gradient since the last scaled backward pass.
    # Each value is True if the optimizer in the key has stepped since the gradient was last unscaled.
    used_by: dict[int, bool] = field(default_factory=dict)
    # True if any backward pass but the latest has added to the gradient since an optimizer last used it.
    has_grown: bool = False

    def is_changed(self, grad: Tensor | None) -> bool:
        """Return whether the gradient was written to, replaced or set to None since it was last recorded."""
        now, seen = _seen(grad), self.seen
        if now is None or seen is None:
            return now is not seen
        return seen[0].expired() or seen[1:] != now[1:]

    def is_elsewhere(self, grad: Tensor | None) -> bool:
        """Return whether the gradient is None, or its address has changed since it was last recorded."""
        now, seen = _seen(grad), self.seen
        return now is None or seen is None or seen[0].expired() or seen[1] != now[1]


class GradientLedger:
    """The records of an optimizer's parameters.

    Args:
        params: The parameters. The ledger stores the list but no gradients, because
            ``torch.utils.swap_tensors`` refuses tensors that something else references.
        known: Other ledgers. If another ledger has a record for a parameter, this ledger uses the same
            record.
        scale: The loss scale that the gradients of new parameters carry.
    """

    def __init__(
        self, params: list[Tensor], known: Sequence[GradientLedger], scale: LossScale | None
    ) -> None:
        self.params = params
        known_records: dict[int, Record] = {
            id(param): record
            for ledger in known
            for param, record in zip(ledger.params, ledger.records, strict=True)
        }
        self.records: list[Record] = [known_records.setdefault(id(param), Record(scale)) for param in params]

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    def parts(self) -> list[tuple[LossScale | None, list[Tensor], bool]]:
        """Group the parameters by the loss scale that is recorded for their gradients.

        Parameters that have no gradient at the moment are included.

        Returns:
            One tuple for each loss scale. The tuple holds the loss scale (None for unscaled gradients), the
            parameters whose gradients carry it, and whether any of these gradients has changed since it was
            last recorded.
        """
        parts: dict[LossScale | None, tuple[list[Tensor], list[bool]]] = {}
        for param, record in zip(self.params, self.records, strict=True):
            members, changes = parts.setdefault(record.carries, ([], []))
            members.append(param)
            changes.append(param.grad is not None and record.is_changed(param.grad))
        return [(scale, members, any(changes)) for scale, (members, changes) in parts.items()]

    def begin_backward(self, scale: LossScale) -> None:
        """Record the start of a backward pass from a loss that was multiplied by ``scale``.

        Gradients carry ``scale`` from now on.
        """
        for grad, record in self._each():
            goes_on = record.carries is scale and not record.used_by
            if not record.used_by:
                record.has_grown |= record.is_changed(grad)
            record.has_grown &= grad is not None
            record.used_by.clear()
            record.carries = scale
            # If the gradient goes on accumulating, keep ``seen``, so that earlier changes are still noticed.
            if not goes_on:
                record.seen = _seen(grad)

    def carry_nothing(self, optimizer: int, updates: int, steps: bool) -> None:
        """Record that an optimizer uses its gradients, which are already divided by their loss scale.

        Args:
            optimizer: The number that identifies the optimizer, or 0 if the gradients are only clipped.
                Gradients that have only been clipped are never taken for newly scaled gradients, so the user
                may clip the same gradients repeatedly.
            updates: The number of updates of the loss scale that have been requested.
            steps: True if the optimizer steps with the gradients; False if it only unscales them.
        """
        for grad, record in self._each():
            if record.carries is not None:
                record.used_by = dict.fromkeys(record.used_by, False)
            record.used_by[optimizer] = steps or record.used_by.get(optimizer, False)
            record.carries, record.used_at, record.has_grown = None, updates, False
            record.seen = _seen(grad)

    def assume_scaled(self, scale: LossScale, optimizer: int, updates: int) -> bool:
        """Mark unscaled gradients as still scaled, if torch.amp would unscale them a second time.

        After an optimizer step, the gradients that the step used are assumed to be scaled. If the optimizer
        has unscaled a gradient but has not stepped, the gradient is assumed to be scaled only if its address
        has changed.

        Args:
            scale: The loss scale by which the gradients are assumed to be multiplied.
            optimizer: The number that identifies the optimizer.
            updates: The number of updates that have been requested. If a gradient has been used since the
                last update, its record does not change.

        Returns:
            True if any existing gradient is now assumed to be scaled.
        """
        found = False
        for grad, record in self._each():
            is_due = record.carries is None and record.used_at != updates and optimizer in record.used_by
            if is_due and (record.used_by[optimizer] or record.is_elsewhere(grad)):
                record.carries = scale
                found |= grad is not None
        return found

    def write(self, write: Callable[[], None]) -> None:
        """Call ``write`` (a function that multiplies gradients), but do not mark the gradients as changed.

        A gradient that had already changed before ``write`` was called still counts as changed.
        """
        same = [not record.is_changed(grad) for grad, record in self._each()]
        write()
        for (grad, record), is_same in zip(self._each(), same, strict=True):
            if is_same:
                record.seen = _seen(grad)

    def look_again(self) -> None:
        """Record the addresses and version counters of the gradients after clipping has changed them."""
        for grad, record in self._each():
            record.seen = _seen(grad)

    def waits(self) -> bool:
        """Return whether any scaled gradient has changed since an optimizer last used it."""
        return any(
            grad is not None and record.carries is not None and (record.has_grown or record.is_changed(grad))
            for grad, record in self._each()
        )

    def has_grown(self) -> bool:
        """Return whether a backward pass has added to a gradient since its last use.

        Call this method only after a scaled backward pass has begun. If a gradient changed before the
        backward pass began, the change may come from the user's code and not from autograd.
        """
        return any(record.has_grown or record.is_changed(grad) for grad, record in self._each())

    def is_changed(self) -> bool:
        """Return whether any gradient was written to, replaced or set to None since it was last recorded."""
        return any(record.is_changed(grad) for grad, record in self._each())

    def _each(self) -> list[tuple[Tensor | None, Record]]:
        return [(param.grad, record) for param, record in zip(self.params, self.records, strict=True)]


def _seen(grad: Tensor | None) -> _Seen:
    if grad is None:
        return None
    version = 0 if grad.is_inference() else grad._version
    if grad.layout is not torch.strided:
        return torch._C._WeakTensorRef(grad), id(grad), version  # type: ignore[attr-defined]
    storage: Any = grad.untyped_storage()
    reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return reference, (storage._cdata, grad.storage_offset()), version


def make_ledger(params: list[Tensor], known: Sequence[Any], scale: LossScale | None) -> Any:
    """Return a native ledger if the native Python extension is loaded, else one written in Python."""
    extension = native_core().extension
    kind = GradientLedger if extension is None else extension.GradientLedger
    return kind(params, known, scale)
