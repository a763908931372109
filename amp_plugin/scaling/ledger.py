"""The ledger: one record per parameter says what its gradient carries. Only the ledger changes a record.

A gradient *carries* the loss scale that it is multiplied by, or nothing. A record belongs to its parameter,
not to an optimizer, so optimizers that share a parameter share its record. To *use* a gradient is to unscale
it by ``unscale_``, to clip it, or to step with it. Five events change a record:

=================================== =================== ============================== ==================
event                               carries nothing     carries S                      method
=================================== =================== ============================== ==================
a backward pass of scale T begins   times T, carries T  times T/S, carries T           ``begin_backward``
a use, other than the next one      stays               divided by S, carries nothing  ``carry_nothing``
a step that divides in its kernel   stays               carries nothing afterwards     ``carry_nothing``
S takes a new value                 stays               times new/old, carries S       ``write``
used again after step and update    carries S again     carries S                      ``assume_scaled``
=================================== =================== ============================== ==================

The caller first multiplies or divides the gradients (:mod:`amp_plugin.scaling.optimizer_state`), and the
ledger then records it. These sentences complete the table:

- A record points to the loss scale, not to a number. So a gradient is divided by the value that S has then.
- A backward pass begins for the gradients of all optimizers, also for those that it does not reach.
- After ``unscale_``, each further backward pass unscales the gradients of that optimizer again when it ends,
  until the optimizer steps or ``update()`` is called.
- ``update()`` is a request. S takes its new value when no gradient of any optimizer ``waits()``, or at the
  latest when the next loss is scaled, before that loss is multiplied.
- An overflow counts for each loss scale that has gone into the gradient, and lowers it at its next update.
- The last row: the same optimizer unscales or steps again, after its own step and an update, without a
  scaled backward pass in between. The gradient may have been written without a trace, through ``.data``, by
  NumPy or by a collective, so it counts as scaled whether or not it was seen to change. If the optimizer had
  only unscaled, and not stepped, this holds only for a gradient that is in other memory now.

The ledger also knows whether a gradient was changed by a backward pass or by the user. For this it compares
each gradient's memory and version with the memory and version at its last look::

    waits()       a scaled gradient that no optimizer has used since a backward pass added to it
    has_grown()   a backward pass has added to a gradient, asked after one has begun
    is_changed()  a gradient was written to, replaced or dropped since the last look

The native core has the same class in C++ (``csrc/python/gradient_ledger.cpp``), many times as fast.
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

_Seen = tuple[Any, Any, int] | None  # a gradient's memory (held weakly), its offset in it, and its version


@dataclass(eq=False, slots=True)
class Record:
    """What is known of one parameter's gradient."""

    carries: LossScale | None
    seen: _Seen = None
    used_at: int = -1  # the number of updates that had been requested when an optimizer last used it
    # The number of each optimizer that has used it since the last scaled backward pass began (0 for a clip):
    # True if it has stepped with it, False if not, or not since the gradient was last divided.
    used_by: dict[int, bool] = field(default_factory=dict)
    # True if a scaled backward pass, which a later one has followed, has added to it since it was last used.
    has_grown: bool = False

    def is_changed(self, grad: Tensor | None) -> bool:
        """Return whether the gradient was written to, replaced or dropped since the last look."""
        now, seen = _seen(grad), self.seen
        if now is None or seen is None:
            return now is not seen
        return seen[0].expired() or seen[1:] != now[1:]

    def is_elsewhere(self, grad: Tensor | None) -> bool:
        """Return whether the gradient is in other memory than at the last look, or gone."""
        now, seen = _seen(grad), self.seen
        return now is None or seen is None or seen[0].expired() or seen[1] != now[1]


class GradientLedger:
    """The records of an optimizer's parameters.

    Args:
        params: The parameters. The ledger refers to them by this list only, and holds no gradients, because
            a second reference to a tensor would stop ``torch.utils.swap_tensors``.
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
        """Return the parameters by the scale that their gradients carry, also those without a gradient.

        Returns:
            For each scale, or None: itself, the parameters, and whether a gradient has changed since the
            last look.
        """
        parts: dict[LossScale | None, tuple[list[Tensor], list[bool]]] = {}
        for param, record in zip(self.params, self.records, strict=True):
            members, changes = parts.setdefault(record.carries, ([], []))
            members.append(param)
            changes.append(param.grad is not None and record.is_changed(param.grad))
        return [(scale, members, any(changes)) for scale, (members, changes) in parts.items()]

    def begin_backward(self, scale: LossScale) -> None:
        """Record that a backward pass from a loss times ``scale`` begins, after gradients were multiplied."""
        for grad, record in self._each():
            goes_on = record.carries is scale and not record.used_by
            if not record.used_by:
                record.has_grown |= record.is_changed(grad)
            record.has_grown &= grad is not None
            record.used_by.clear()
            record.carries = scale
            if not goes_on:  # else a change in an earlier pass of this scale would be forgotten
                record.seen = _seen(grad)

    def carry_nothing(self, optimizer: int, updates: int, steps: bool) -> None:
        """Record that an optimizer uses its gradients, after they were divided by their scale.

        Args:
            optimizer: The number of the optimizer; 0 if it did not ask for the division, as in a clip.
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

        These are all gradients with which the optimizer has stepped. Of the gradients that it has only
        unscaled, they are those that are in other memory now.

        Args:
            scale: The scale that they carry from now on.
            optimizer: The number of the optimizer.
            updates: The number of updates that have been requested. Gradients that were used after the last
                one do not change.

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
        """Run ``write``, which multiplies gradients. A gradient that had changed before stays changed."""
        same = [not record.is_changed(grad) for grad, record in self._each()]
        write()
        for (grad, record), is_same in zip(self._each(), same, strict=True):
            if is_same:
                record.seen = _seen(grad)

    def look_again(self) -> None:
        """Record the present memory and versions of the gradients, after a clip has written them."""
        for grad, record in self._each():
            record.seen = _seen(grad)

    def waits(self) -> bool:
        """Return whether a gradient carries a scale, has grown or changed, and was not used since."""
        return any(
            grad is not None and record.carries is not None and (record.has_grown or record.is_changed(grad))
            for grad, record in self._each()
        )

    def has_grown(self) -> bool:
        """Return whether a backward pass has added to a gradient since its last use.

        It is asked only once a scaled backward pass has begun. Before that, a change may be the user's.
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
