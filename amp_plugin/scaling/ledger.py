"""What a gradient carries: one record per parameter, and the only place where that changes.

A gradient *carries* the loss scale that it is multiplied by, or nothing. A record belongs to its parameter,
not to an optimizer, so optimizers that share a parameter share its record. Five events change it:

=================================== =================== ============================== ==================
event                               carries nothing     carries S                      method
=================================== =================== ============================== ==================
a backward pass of scale T begins   times T, carries T  times T/S, carries T           ``begin_backward``
``unscale_``, a clip, a plain step  stays               divided by S, carries nothing  ``carry_nothing``
a step that divides in its kernel   stays               carries nothing afterwards     ``carry_nothing``
``update()`` is applied, not used   stays               times new/old                  ``write``
used after a step and an update     carries S again     carries S                      ``assume_scaled``
=================================== =================== ============================== ==================

The caller multiplies the gradients (:mod:`amp_plugin.scaling.optimizer_state`), the ledger keeps the books.
It also tells a backward pass that added to a gradient from a user who wrote to it. For this it compares each
gradient's memory and version with those of the last look::

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

_Seen = tuple[Any, Any, int] | None  # a gradient's memory, held weakly, its place there, its version


@dataclass(eq=False, slots=True)
class Record:
    """What is known of one parameter's gradient."""

    carries: LossScale | None
    seen: _Seen = None
    used_at: int = -1  # how many updates had been requested when an optimizer last used it
    # The optimizers that have used it since the last scaled backward pass began, and whether they have
    # stepped with it since it was last divided.
    used_by: dict[int, bool] = field(default_factory=dict)
    has_grown: bool = False  # a scaled backward pass has added to it since it was last used

    def is_changed(self, grad: Tensor | None) -> bool:
        """Whether the gradient was written to, replaced or dropped since the last look."""
        now, seen = _seen(grad), self.seen
        if now is None or seen is None:
            return now is not seen
        return seen[0].expired() or seen[1:] != now[1:]

    def is_elsewhere(self, grad: Tensor | None) -> bool:
        """Whether the gradient is in other memory than at the last look, or gone."""
        now, seen = _seen(grad), self.seen
        return now is None or seen is None or seen[0].expired() or seen[1] != now[1]


class GradientLedger:
    """The records of an optimizer's parameters.

    Args:
        params: The parameters. Only the list refers to them, and nothing to their gradients: a second
            reference to a tensor would stop ``torch.utils.swap_tensors``.
        known: Ledgers that may have records of them already.
        scale: What the gradients of other parameters carry.
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
        """Whether a parameter has a gradient."""
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
        """A backward pass from a loss times ``scale`` begins; the gradients have been multiplied for it."""
        for grad, record in self._each():
            if not record.used_by:
                record.has_grown |= record.is_changed(grad)
            record.has_grown &= grad is not None
            record.used_by.clear()
            record.carries, record.seen = scale, _seen(grad)

    def carry_nothing(self, optimizer: int, updates: int, steps: bool) -> None:
        """An optimizer uses the gradients; they have been divided by what they carried.

        Args:
            optimizer: The optimizer, by a number; 0 if it did not ask for it, as in a clip.
            updates: How many updates of the loss scale have been requested.
            steps: Whether it steps with them; else it only unscales them.
        """
        for grad, record in self._each():
            if record.carries is not None:
                record.used_by = dict.fromkeys(record.used_by, False)
            record.used_by[optimizer] = steps or record.used_by.get(optimizer, False)
            record.carries, record.used_at, record.has_grown = None, updates, False
            record.seen = _seen(grad)

    def assume_scaled(self, scale: LossScale, optimizer: int, updates: int) -> bool:
        """Take gradients that carry nothing for scaled ones where torch.amp does.

        All that the optimizer has stepped with are. Of those that it has only unscaled, the ones in other
        memory are.

        Args:
            scale: What they carry.
            optimizer: The optimizer, by a number.
            updates: How many updates have been requested; gradients used since the last one are left.

        Returns:
            Whether there was one.
        """
        found = False
        for grad, record in self._each():
            is_due = record.carries is None and record.used_at != updates and optimizer in record.used_by
            if is_due and (record.used_by[optimizer] or record.is_elsewhere(grad)):
                record.carries = scale
                found |= grad is not None
        return found

    def write(self, write: Callable[[], None]) -> None:
        """Run ``write``, which multiplies gradients; what had changed before still counts as changed."""
        same = [not record.is_changed(grad) for grad, record in self._each()]
        write()
        for (grad, record), is_same in zip(self._each(), same, strict=True):
            if is_same:
                record.seen = _seen(grad)

    def look_again(self) -> None:
        """Take the gradients as they are now for seen: a clip has written them."""
        for grad, record in self._each():
            record.seen = _seen(grad)

    def waits(self) -> bool:
        """Whether a gradient carries a scale, has grown or changed, and was not used since."""
        return any(
            grad is not None and record.carries is not None and (record.has_grown or record.is_changed(grad))
            for grad, record in self._each()
        )

    def has_grown(self) -> bool:
        """Whether a backward pass has added to a gradient since its last use; asked after one has begun."""
        return any(record.has_grown or record.is_changed(grad) for grad, record in self._each())

    def is_changed(self) -> bool:
        """Whether a gradient was written to, replaced or dropped since the last look."""
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
