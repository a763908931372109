"""The ledger has one record per parameter, which says by which loss scale the gradient is multiplied.

A gradient *carries* the loss scale that it is multiplied by. An unscaled gradient carries nothing. A record
belongs to a parameter and not to an optimizer, so optimizers that share a parameter share its record. Only
the ledger changes a record. To *use* a gradient is to unscale it by ``unscale_``, to clip it, or to step with
it. Five events change a record:

=================================== =================== ============================== ==================
event                               carries nothing     carries S                      method
=================================== =================== ============================== ==================
a backward pass of scale T begins   times T, carries T  times T/S, carries T           ``begin_backward``
a use, other than the next one      stays               divided by S, carries nothing  ``carry_nothing``
a step that divides in its kernel   stays               carries nothing afterwards     ``carry_nothing``
S takes a new value                 stays               times new/old, carries S       ``write``
used again after step and update    carries S again     carries S                      ``assume_scaled``
=================================== =================== ============================== ==================

First :mod:`amp_plugin.scaling.optimizer_state` multiplies or divides the gradients, and then the ledger
changes the records. These sentences complete the table:

- A record refers to a LossScale object S, not to a number. A gradient is divided by the value that S has at
  that time.
- When a scaled backward pass begins, the gradients of all optimizers are converted, also gradients that the
  pass does not reach.
- If a backward pass follows ``unscale_`` before the step and before ``update()``, the gradients of that
  optimizer are unscaled again when the pass ends.
- ``update()`` is a request. S takes its new value when ``waits()`` is false for every optimizer, and at the
  latest before the next loss is scaled.
- An overflow lowers each loss scale by which a loss of this gradient was multiplied, at the next update.
- In the last row an optimizer unscales or steps again after its own step and an update, without a scaled
  backward pass in between. Writes through ``.data``, NumPy or a collective change no version counter.
  Therefore the gradient counts as scaled, whether or not its version has changed. If the optimizer had only
  unscaled, and not stepped, the gradient counts as scaled only if its memory is another one now.

The ledger also knows whether a backward pass or the user has changed a gradient. It records the address and
the version counter of each gradient when it looks at it, and compares them later::

    waits()       Is there a scaled gradient that no optimizer has used since a backward pass added to it?
    has_grown()   Has a backward pass added to a gradient since its last use?
    is_changed()  Was a gradient written to, replaced or set to None since the last look?

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

# A weak reference to a gradient's storage, its address with offset, and its version counter.
_Seen = tuple[Any, Any, int] | None


@dataclass(eq=False, slots=True)
class Record:
    """The record of one parameter's gradient."""

    carries: LossScale | None
    seen: _Seen = None
    used_at: int = -1  # the number of updates that had been requested when an optimizer last used it
    # The keys are the numbers of optimizers that have used the gradient since the last scaled backward pass.
    # The value is True if that optimizer has stepped with the gradient since it was last divided.
    used_by: dict[int, bool] = field(default_factory=dict)
    # True if a scaled backward pass before the last one has added to the gradient since it was last used.
    has_grown: bool = False

    def is_changed(self, grad: Tensor | None) -> bool:
        """Return whether the gradient was written to, replaced or set to None since the last look."""
        now, seen = _seen(grad), self.seen
        if now is None or seen is None:
            return now is not seen
        return seen[0].expired() or seen[1:] != now[1:]

    def is_elsewhere(self, grad: Tensor | None) -> bool:
        """Return whether the gradient is None, or has another address than at the last look."""
        now, seen = _seen(grad), self.seen
        return now is None or seen is None or seen[0].expired() or seen[1] != now[1]


class GradientLedger:
    """The records of an optimizer's parameters.

    Args:
        params: The parameters. The ledger keeps this list and no gradients, because
            ``torch.utils.swap_tensors`` refuses tensors to which there is another reference.
        known: Other ledgers. If another ledger has a record of a parameter, this ledger uses the same record.
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
        """Return whether a parameter has a gradient."""
        return any(param.grad is not None for param in self.params)

    def parts(self) -> list[tuple[LossScale | None, list[Tensor], bool]]:
        """Group all parameters, with and without a gradient, by the loss scale that the gradients carry.

        Returns:
            A tuple for each loss scale: the loss scale or None, the parameters, and whether a gradient has
            changed since the last look.
        """
        parts: dict[LossScale | None, tuple[list[Tensor], list[bool]]] = {}
        for param, record in zip(self.params, self.records, strict=True):
            members, changes = parts.setdefault(record.carries, ([], []))
            members.append(param)
            changes.append(param.grad is not None and record.is_changed(param.grad))
        return [(scale, members, any(changes)) for scale, (members, changes) in parts.items()]

    def begin_backward(self, scale: LossScale) -> None:
        """Record that a backward pass from a loss times ``scale`` begins.

        Gradients carry ``scale`` from now on.
        """
        for grad, record in self._each():
            goes_on = record.carries is scale and not record.used_by
            if not record.used_by:
                record.has_grown |= record.is_changed(grad)
            record.has_grown &= grad is not None
            record.used_by.clear()
            record.carries = scale
            if not goes_on:  # else changes by an earlier backward pass would be forgotten
                record.seen = _seen(grad)

    def carry_nothing(self, optimizer: int, updates: int, steps: bool) -> None:
        """Record that an optimizer uses its gradients, which were divided by their loss scale before.

        Args:
            optimizer: The number of the optimizer. It is 0 in a clip, which the user may repeat.
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
        """Treat gradients that carry nothing as scaled, in the same cases as torch.amp.

        They are all gradients with which the optimizer has stepped. A gradient that the optimizer has only
        unscaled counts as scaled if it has another address now.

        Args:
            scale: The scale that they carry from now on.
            optimizer: The number of the optimizer.
            updates: The number of updates that have been requested. Gradients that were used after the last
                update do not change.

        Returns:
            True if there was such a gradient.
        """
        found = False
        for grad, record in self._each():
            is_due = record.carries is None and record.used_at != updates and optimizer in record.used_by
            if is_due and (record.used_by[optimizer] or record.is_elsewhere(grad)):
                record.carries = scale
                found |= grad is not None
        return found

    def write(self, write: Callable[[], None]) -> None:
        """Call ``write``, which multiplies gradients.

        A gradient counts as changed only if it had changed before.
        """
        same = [not record.is_changed(grad) for grad, record in self._each()]
        write()
        for (grad, record), is_same in zip(self._each(), same, strict=True):
            if is_same:
                record.seen = _seen(grad)

    def look_again(self) -> None:
        """Record the addresses and version counters of the gradients after a clip has written to them."""
        for grad, record in self._each():
            record.seen = _seen(grad)

    def waits(self) -> bool:
        """Return whether a scaled gradient was added to or changed, and no optimizer has used it since."""
        return any(
            grad is not None and record.carries is not None and (record.has_grown or record.is_changed(grad))
            for grad, record in self._each()
        )

    def has_grown(self) -> bool:
        """Return whether a backward pass has added to a gradient since its last use.

        Call it only after a scaled backward pass has begun. Before that, the user may have changed the
        gradient.
        """
        return any(record.has_grown or record.is_changed(grad) for grad, record in self._each())

    def is_changed(self) -> bool:
        """Return whether a gradient was written to, replaced or dropped since the last look."""
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
    """Return a native ledger if the Python extension is loaded, else the Python one."""
    extension = native_core().extension
    kind = GradientLedger if extension is None else extension.GradientLedger
    return kind(params, known, scale)
