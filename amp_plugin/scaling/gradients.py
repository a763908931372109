"""An optimizer's gradients as batches that one kernel call can take.

A batch has one device and one shard layout. Dense gradients go in as they are, sparse ones
through their coalesced values, DTensors through their local tensors. With the native core,
looking up 1000 gradients costs some 10 us, without it ten times as much; the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_plugin.kernels import ops  # noqa: F401 -- what batches run is registered there
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.shard_layout import ShardLayout, is_partial, local_gradient

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Measurement(NamedTuple):
    """What one kernel call found in a batch.

    Attributes:
        norm: Norm of the unscaled gradients, float32, 0-dim.
        found_inf: 1.0 if an element is not finite, else 0.0; float32, 0-dim.
        flags: For each gradient whether it holds inf or nan, int32, 1-dim.
        positions: Which of the set's parameters they belong to; None if all of them, in order.
        layout: How they are sharded over ranks; None if every rank holds all of them.
        kept: False if the overflow was forgotten since, bool, 0-dim, one for each time that was looked at.
    """

    norm: Tensor
    found_inf: Tensor
    flags: Tensor
    positions: Sequence[int] | None = None
    layout: ShardLayout | None = None
    kept: tuple[Tensor, ...] = ()

    def flagged(self) -> Tensor:
        """Return the flags of overflows that count."""
        flags = self.flags
        for kept in self.kept:
            flags = flags * kept.to(flags.device)
        return flags


class GradientBatch(NamedTuple):
    """Gradients that one kernel call takes.

    Attributes:
        device: Their device.
        layout: As a measurement's.
        positions: As a measurement's.
        run: Calls one of the package's ops, by name and with its other arguments, on the gradients.
    """

    device: torch.device
    layout: ShardLayout | None
    positions: Sequence[int] | None
    run: Callable[..., Any]

    def norm_check(self, inv_scale: Tensor, norm_type: float, is_scale: bool = False) -> Measurement:
        """Measure the gradients times ``inv_scale``.

        With ``is_scale`` the number is the scale itself, which saves the launch that inverts it.
        """
        found: tuple[Tensor, Tensor, Tensor] = self.run("norm_check", inv_scale, norm_type, is_scale)
        return Measurement(*found, self.positions, self.layout)

    def unscale_(self, inv_scale: Tensor, norm_type: float, is_scale: bool = False) -> Measurement:
        """Multiply in place by ``inv_scale``, or divide by it with ``is_scale``, and measure."""
        found: tuple[Tensor, Tensor, Tensor] = self.run("unscale_", inv_scale, norm_type, is_scale)
        return Measurement(*found, self.positions, self.layout)

    def multiply_(self, factor: Tensor) -> Tensor:
        """Multiply in place; returns whether a product is not finite, float32, 0-dim."""
        return self.run("multiply_", factor)  # type: ignore[no-any-return]


class GradientLedger:
    """Remembers which gradients were seen: by memory and version.

    Each call is given the parameters whose ``.grad`` it is about, always the same list. The ledger
    itself refers to neither parameters nor gradients, which ``torch.utils.swap_tensors`` forbids.
    ``GradientLedger`` of the Python extension is the same in C++.
    """

    GONE, SAME, CHANGED, NEW = -1, 0, 1, 2

    def __init__(self) -> None:
        self._marks: dict[int, list[_Mark | None]] = {}

    def count(self, params: list[Tensor]) -> int:
        """Return how many parameters have a gradient."""
        return sum(param.grad is not None for param in params)

    def remember(self, params: list[Tensor], slot: int) -> None:
        """Note the present gradients under ``slot``."""
        self._marks[slot] = [None if param.grad is None else _Mark(param.grad) for param in params]

    def compare(self, params: list[Tensor], slot: int) -> int:
        """Compare the present gradients with those noted under ``slot``.

        Returns:
            2 if one is in other memory, else 1 if one was written to, else -1 if one is gone, else 0.
        """
        marks = self._marks.get(slot) or [None] * len(params)
        changes = [_change(param.grad, mark) for param, mark in zip(params, marks, strict=True)]
        return max(changes, default=self.SAME) or min(changes, default=self.SAME)

    def split(self, positions: Sequence[int]) -> GradientLedger:
        """Return a ledger of the parameters at ``positions``, with all that was noted of them."""
        part = GradientLedger()
        part._marks = {slot: [marks[i] for i in positions] for slot, marks in self._marks.items()}
        return part

    def first_half(self, params: list[Tensor]) -> int:
        """Return the position of the first parameter with a float16 gradient, -1 if there is none."""
        dtypes = (None if param.grad is None else param.grad.dtype for param in params)
        return next((i for i, dtype in enumerate(dtypes) if dtype is torch.float16), -1)

    def hooked(self, params: list[Tensor]) -> list[int]:
        """Return the positions of parameters with hooks that run once their gradient is there."""
        return [i for i, param in enumerate(params) if getattr(param, "_post_accumulate_grad_hooks", None)]


class _Mark:
    """A gradient as it was seen."""

    def __init__(self, grad: Tensor) -> None:
        dense = grad.layout is torch.strided
        reference: Any = StorageWeakRef if dense else torch._C._WeakTensorRef  # type: ignore[attr-defined]
        self._owner = reference(grad.untyped_storage() if dense else grad)
        self._place = _place(grad)
        self.version = _version(grad)

    def is_of(self, grad: Tensor) -> bool:
        """Whether the gradient is in the same memory."""
        return not self._owner.expired() and self._place == _place(grad)


def _change(grad: Tensor | None, mark: _Mark | None) -> int:
    if grad is None:
        return GradientLedger.SAME if mark is None else GradientLedger.GONE
    if mark is None or not mark.is_of(grad):
        return GradientLedger.NEW
    return GradientLedger.CHANGED if mark.version != _version(grad) else GradientLedger.SAME


def _place(grad: Tensor) -> tuple[Any, ...]:
    if grad.layout is torch.strided:
        return grad.untyped_storage()._cdata, grad.storage_offset()
    return (id(grad),)


def _version(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version


def make_ledger() -> Any:
    """Return a native ledger if the Python extension is loaded, else the Python one."""
    extension = native_core().region
    return GradientLedger() if extension is None else extension.GradientLedger()


def batches_of(ledger: Any, params: list[Tensor]) -> list[GradientBatch]:
    """Return the present gradients of ``params``; a native ledger runs plain ones and shards itself."""
    native = None if isinstance(ledger, GradientLedger) else _native_batches(ledger, params)
    return batch_gradients(params) if native is None else native


def _native_batches(ledger: Any, params: list[Tensor]) -> list[GradientBatch] | None:
    """Return the same as :func:`batch_gradients` without a look at each; None if there are other kinds."""
    device, positions = ledger.survey(params)
    if device is not None:
        return [GradientBatch(device, None, positions, partial(_run_by_ledger, ledger, params))]
    groups = ledger.survey_shards(params)
    if groups is None or any(spec is not None and is_partial(spec.placements) for spec, _, _ in groups):
        return None
    found: dict[tuple[torch.device, ShardLayout | None], list[int]] = {}
    for spec, on, members in groups:
        layout = None if spec is None else ShardLayout.of(spec.mesh, spec.placements)
        found.setdefault((on, layout), []).extend(members)
    batches = []
    for (on, layout), members in found.items():
        positions = sorted(members)
        run = partial(_run_by_ledger, ledger, [params[position] for position in positions])
        batches.append(GradientBatch(on, layout, positions, run))
    return batches


def _run_by_ledger(ledger: Any, params: list[Tensor], op: str, *arguments: Any) -> Any:
    return getattr(ledger, op)(params, *arguments)


def batch_gradients(params: Sequence[Tensor]) -> list[GradientBatch]:
    """Look up the gradients of ``params``, whatever their kind.

    Uncoalesced sparse gradients, Partial DTensors and lazily conjugated ones are replaced by
    their plain equal, in ``.grad`` too.
    """
    found: dict[tuple[torch.device, ShardLayout | None, bool], tuple[list[Tensor], list[int]]] = {}
    for position, param in enumerate(params):
        if param.grad is None:
            continue
        values, layout = local_gradient(param)
        values = _dense_values(param, values)
        tensors, positions = found.setdefault((values.device, layout, _is_narrow(values)), ([], []))
        tensors.append(values)
        positions.append(position)
    return [
        GradientBatch(device, layout, positions, partial(_run_widened if narrow else _run, tensors))
        for (device, layout, narrow), (tensors, positions) in found.items()
    ]


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


def _run(tensors: list[Tensor], op: str, *arguments: Any) -> Any:
    return getattr(torch.ops.amp_plugin, op)(tensors, *arguments)


def _run_widened(tensors: list[Tensor], op: str, *arguments: Any) -> Any:
    """float8 gradients: widened, worked on, rounded back."""
    wide = [tensor.float() for tensor in tensors]
    result = _run(wide, op, *arguments)
    if op.endswith("_"):
        for tensor, value in zip(tensors, wide, strict=True):
            tensor.copy_(value)
    return result
