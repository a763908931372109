"""An optimizer's gradients as groups that one kernel call can take.

A group has one device and one way of being spread over ranks. Dense gradients go in
as they are, sparse ones through their coalesced values, DTensors through their local
tensors. With the native core, looking up 1000 gradients costs some 10 us, without it
ten times as much; the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.spread import Spread, local_gradient

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}

Measured = tuple[Tensor, Tensor, Tensor]
"""Norm, found_inf and flags, as the ops return them."""


class Group(NamedTuple):
    """Gradients that one kernel call takes.

    Attributes:
        device: Their device.
        spread: How they are spread over ranks; None if every rank holds all of them.
        positions: Which of the set's parameters they belong to; None if all of them, in order.
        norm_check: ``(inv_scale, norm_type) -> norm, found_inf, flags``; reads.
        unscale_: The same, and multiplies in place.
        multiply_: ``factor -> found_inf``; multiplies in place.
    """

    device: torch.device
    spread: Spread | None
    positions: Sequence[int] | None
    norm_check: Callable[[Tensor, float], Measured]
    unscale_: Callable[[Tensor, float], Measured]
    multiply_: Callable[[Tensor], Tensor]


class GradientLedger:
    """Remembers which gradients were seen: by tensor identity and version.

    Plain Python; ``torch.classes.amp_plugin.GradientLedger`` is the same in C++.

    Args:
        params: The parameters whose ``.grad`` is watched.
    """

    GONE, SAME, CHANGED, NEW = -1, 0, 1, 2

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._marks: dict[int, list[tuple[Any, int, int] | None]] = {}

    def count(self) -> int:
        """Return how many parameters have a gradient."""
        return sum(p.grad is not None for p in self._params)

    def remember(self, slot: int) -> None:
        """Note the present gradients under ``slot``."""
        grads = (p.grad for p in self._params)
        self._marks[slot] = [None if g is None else (_weak_reference(g), id(g), _version(g)) for g in grads]

    def forget(self, slot: int) -> None:
        """Drop what was noted under ``slot``: every gradient is new again."""
        self._marks.pop(slot, None)

    def compare(self, slot: int) -> int:
        """Compare the present gradients with those noted under ``slot``.

        Returns:
            2 if one is another tensor, else 1 if one was written to, else -1 if one is gone, else 0.
        """
        marks = self._marks.get(slot)
        worst = self.SAME
        for i, param in enumerate(self._params):
            grad = param.grad
            mark = None if marks is None else marks[i]
            if grad is not None:
                worst = (
                    max(worst, _compare(grad, mark)) if worst != self.GONE else _compare(grad, mark) or worst
                )
            elif mark is not None and worst == self.SAME:
                worst = self.GONE
        return worst


def _compare(grad: Tensor, mark: Any) -> int:
    if mark is None:
        return GradientLedger.NEW
    reference, identity, version = mark
    if reference.expired() or id(grad) != identity:
        return GradientLedger.NEW
    return GradientLedger.CHANGED if _version(grad) != version else GradientLedger.SAME


def _weak_reference(grad: Tensor) -> Any:
    return torch._C._WeakTensorRef(grad)  # type: ignore[attr-defined]


def _version(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version


def make_ledger(params: list[Tensor]) -> Any:
    """Return the native ledger for ``params`` if the native core is loaded, else the Python one."""
    if native_core().loaded and params:
        return torch.classes.amp_plugin.GradientLedger(params)
    return GradientLedger(params)


def native_group(ledger: Any) -> Group | None:
    """Return all gradients of a native ledger as one group, if they are plain and on one device."""
    if isinstance(ledger, GradientLedger):
        return None
    device, positions = ledger.survey()
    if device is None:
        return None
    return Group(device, None, positions, ledger.norm_check, ledger.unscale_, ledger.multiply_)


def group_gradients(params: Sequence[Tensor]) -> list[Group]:
    """Look up the gradients of ``params``, whatever their kind.

    Uncoalesced sparse gradients, Partial DTensors and lazily conjugated ones are replaced by
    their plain equal, in ``.grad`` too.
    """
    found: dict[tuple[torch.device, Spread | None, bool], tuple[list[Tensor], list[int]]] = {}
    for position, param in enumerate(params):
        if param.grad is None:
            continue
        values, spread = local_gradient(param)
        values = _dense_values(param, values)
        tensors, positions = found.setdefault((values.device, spread, _is_narrow(values)), ([], []))
        tensors.append(values)
        positions.append(position)
    return [_tensor_group(*key, *content) for key, content in found.items()]


def _dense_values(param: Tensor, grad: Tensor) -> Tensor:
    """The tensor to work on: duplicates of a sparse gradient are added up first.

    torch coalesces float16 only; the norm needs the sums whatever the dtype.
    """
    if grad.layout is torch.sparse_coo:
        if not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        return grad._values()
    if grad.layout in _COMPRESSED:
        return grad.values()
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return grad


def _is_narrow(grad: Tensor) -> bool:
    return grad.is_floating_point() and grad.dtype.itemsize == 1


def _tensor_group(
    device: torch.device, spread: Spread | None, narrow: bool, tensors: list[Tensor], positions: list[int]
) -> Group:
    if narrow:
        return _narrow_group(device, spread, tensors, positions)
    op = torch.ops.amp_plugin
    return Group(
        device,
        spread,
        positions,
        lambda inv_scale, norm_type: op.norm_check(tensors, inv_scale, norm_type),
        lambda inv_scale, norm_type: op.unscale_(tensors, inv_scale, norm_type),
        lambda factor: op.multiply_(tensors, factor),
    )


def _narrow_group(
    device: torch.device, spread: Spread | None, tensors: list[Tensor], positions: list[int]
) -> Group:
    """float8 gradients: widened, worked on, rounded back."""
    op = torch.ops.amp_plugin

    def widened(call: Callable[[list[Tensor]], Any]) -> Any:
        wide = [t.float() for t in tensors]
        result = call(wide)
        for tensor, value in zip(tensors, wide, strict=True):
            tensor.copy_(value)
        return result

    return Group(
        device,
        spread,
        positions,
        lambda inv_scale, norm_type: op.norm_check([t.float() for t in tensors], inv_scale, norm_type),
        lambda inv_scale, norm_type: widened(lambda wide: op.unscale_(wide, inv_scale, norm_type)),
        lambda factor: widened(lambda wide: op.multiply_(wide, factor)),
    )
