"""An optimizer's gradients as batches that one kernel call can take, and how they lie in memory and on ranks.

A batch has one device and one shard layout. Dense gradients go in as they are, sparse ones
through their coalesced values, DTensors through their local tensors. The native core looks gradients up
ten times as fast as Python; the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from amp_plugin.kernels import ops  # noqa: F401 -- what batches run is registered there
from amp_plugin.kernels.build import native_core

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class ShardLayout(NamedTuple):
    """Which ranks hold which parts of a gradient.

    Attributes:
        mesh: The device mesh.
        sharded: For each mesh dimension, whether ranks along it hold different elements.
    """

    mesh: DeviceMesh
    sharded: tuple[bool, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Any]) -> ShardLayout:
        """Read a DTensor's; FSDP2 over tensor parallelism has kinds of placements of its own."""
        return cls(mesh, tuple(not (kind.is_replicate() or kind.is_partial()) for kind in placements))

    def replicas(self) -> int:
        """Return how many ranks hold the same elements."""
        sizes = (self.mesh.size(dim) for dim, sharded in enumerate(self.sharded) if not sharded)
        return math.prod(sizes)


class Measurement(NamedTuple):
    """What one kernel call found in a batch.

    Attributes:
        norm: Norm of the unscaled gradients, float32, 0-dim.
        found_inf: 1.0 if an element is not finite, else 0.0; float32, 0-dim.
        flags: For each gradient whether it holds inf (bit 0) or nan (bit 1), uint8, 1-dim.
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
        """Compare the present gradients with those noted under ``slot``."""
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


def local_gradient(param: Tensor) -> tuple[Tensor, ShardLayout | None]:
    """Return this rank's part of ``param.grad``, and the layout of the whole.

    A Partial gradient is summed up first and replaced: neither its norm nor its overflow
    can be told from the summands.
    """
    grad: Any = param.grad
    if not _is_dtensor(grad):
        return grad, None
    if is_partial(grad.placements):
        from torch.distributed.tensor import Replicate  # noqa: PLC0415 -- only DTensor users pay for it

        whole = [Replicate() if p.is_partial() else p for p in grad.placements]
        grad = param.grad = grad.redistribute(placements=whole)
    local = grad._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    return local, ShardLayout.of(grad.device_mesh, grad.placements)


def is_partial(placements: Sequence[Any]) -> bool:
    """Whether ranks hold summands of a DTensor's elements."""
    return any(placement.is_partial() for placement in placements)


def _is_dtensor(grad: Tensor) -> bool:
    if type(grad) in {Tensor, torch.nn.Parameter} or not torch.distributed.is_available():
        return False
    return isinstance(grad, _dtensor())


@cache
def _dtensor() -> type[Tensor]:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- only tensor subclasses pay for it

    return DTensor


def parameter_layouts(params: Sequence[Tensor]) -> tuple[ShardLayout, ...]:
    """Return every layout that the gradients of ``params`` may have, in a fixed order.

    Every rank finds the same list, whatever gradients it has.
    """
    found: dict[ShardLayout, None] = {}
    for param in params:
        if _is_dtensor(param):
            tensor: Any = param
            found[ShardLayout.of(tensor.device_mesh, tensor.placements)] = None
    return tuple(found)


def match_memory_order(optimizer: Optimizer) -> None:
    """Copy gradients and states whose strides differ from their parameter's, for a fused step on the CPU.

    torch's fused optimizers on the CPU walk through memory, not through indices: they would step with the
    wrong elements. Autograd lays gradients out like their parameters, so this copies only what hooks,
    ``autograd.grad`` or a later ``model.to(memory_format=...)`` have left. On GPUs torch looks itself.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            params = [param for param in group["params"] if param.is_cpu]
            _match_gradients(params, optimizer)
            _match_states(params, optimizer.state)


def _match_gradients(params: list[Tensor], optimizer: Optimizer) -> None:
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided and not _has_strides_of(grad, param):
            _refuse_gaps(param, optimizer)
            param.grad = _laid_out_as(param, grad)


def _match_states(params: list[Tensor], states: Any) -> None:
    """All states of a parameter are made in its order: the first of them tells whether it was converted."""
    example = next(((param, states[param]) for param in params if param in states), None)
    if example is None:
        return
    shape = example[0].shape
    names = [name for name, value in example[1].items() if getattr(value, "shape", None) == shape]
    for param in params if names else []:
        state = states.get(param, {})
        first = state.get(names[0])
        if first is not None and not _has_strides_of(first, param):
            for name in names:
                state[name] = _laid_out_as(param, state[name])


def _has_strides_of(tensor: Tensor, param: Tensor) -> bool:
    """Whether elements follow each other in memory as the parameter's do."""
    if tensor.stride() == param.stride():
        return True
    pairs = zip(tensor.stride(), param.stride(), param.shape, strict=True)
    return all(stride == other for stride, other, size in pairs if size != 1)


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _refuse_gaps(param: Tensor, optimizer: Optimizer) -> None:
    """Raise if a copy cannot lie as the parameter does, since that has gaps."""
    if not _has_strides_of(torch.empty_like(param), param):
        msg = (
            f"{type(optimizer).__name__}: a parameter of shape {tuple(param.shape)} and strides "
            f"{param.stride()} has gaps between its elements, which torch's fused step on the CPU would "
            "write to: make it contiguous (param.data = param.data.contiguous()), or pass fused=False."
        )
        raise ValueError(msg)
