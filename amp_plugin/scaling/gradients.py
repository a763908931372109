"""An optimizer's gradients as batches that one kernel call can take, and how they lie in memory and on ranks.

A batch has one device and one shard layout. Dense gradients go in as they are, sparse ones through their
values, DTensors through their local tensors. The native core looks them up ten times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from amp_plugin.kernels import ops  # noqa: F401 -- what batches run is registered there
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.loss_scale import moved

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class ShardLayout(NamedTuple):
    """Which ranks hold which parts of a gradient."""

    mesh: DeviceMesh
    sharded: tuple[bool, ...]  # for each mesh dimension, whether ranks along it hold different elements

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Any]) -> ShardLayout:
        """Read a DTensor's; FSDP2 over tensor parallelism has kinds of placements of its own."""
        return cls(mesh, tuple(not (kind.is_replicate() or kind.is_partial()) for kind in placements))

    def replicas(self) -> int:
        """Return how many ranks hold the same elements."""
        sizes = (self.mesh.size(dim) for dim, sharded in enumerate(self.sharded) if not sharded)
        return math.prod(sizes)


class Measurement(NamedTuple):
    """What one kernel call found in a batch; the norm is that of the unscaled gradients."""

    norm: Tensor  # float32, 0-dim, as the next
    found_inf: Tensor
    flags: Tensor  # for each gradient whether it holds inf (bit 0) or nan (bit 1), uint8, 1-dim
    positions: Sequence[int] | None = None  # of its parameters in the group; None for all, in order
    layout: ShardLayout | None = None  # None if every rank holds all of them
    kept: Tensor | None = None  # False if the overflow was forgotten since, bool, 0-dim

    def places(self) -> Sequence[int]:
        """Return the positions of the gradients in the group."""
        return range(len(self.flags)) if self.positions is None else self.positions

    def flagged(self) -> Tensor:
        """Return the flags of overflows that count."""
        return self.flags if self.kept is None else self.flags * self.kept.to(self.flags.device)


class OverflowHistory:
    """Measurements of gradients before user code wrote to them: a clip by value turns inf into a number."""

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None  # 1.0 if one of them found an overflow; None if there are none
        self.measurements: list[Measurement] = []  # one for the same gradients

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements that are about to be replaced."""
        for new in measurements:
            found = self.found_inf
            self.found_inf = (
                new.found_inf if found is None else torch.maximum(found, moved(new.found_inf, found.device))
            )
            for i, old in enumerate(self.measurements):
                if old.positions == new.positions and old.flags.device == new.flags.device:
                    self.measurements[i] = new._replace(flags=old.flagged() | new.flags)
                    break
            else:
                self.measurements.append(new)

    def forget_if_zero(self, measurements: Iterable[Measurement]) -> None:
        """Forget all if the gradients are zero now: setting them to zero drops the batch."""
        if self.found_inf is None:
            return
        nonzero = [moved(measurement.norm.ne(0), self.found_inf.device) for measurement in measurements]
        if not nonzero:
            self.clear()
            return
        kept = reduce(torch.logical_or, nonzero)
        self.found_inf = self.found_inf * kept
        self.measurements = [
            seen._replace(kept=kept if seen.kept is None else seen.kept & kept) for seen in self.measurements
        ]

    def split(self, positions: Sequence[int]) -> OverflowHistory:
        """Return what was found in the gradients of the parameters at ``positions``."""
        part = OverflowHistory()
        for kept in self.measurements:
            row = {place: i for i, place in enumerate(kept.places())}
            present = [(new, row[old]) for new, old in enumerate(positions) if old in row]
            if present:
                flags = kept.flagged()[[i for _, i in present]]
                found, new = flags.ne(0).any().to(kept.found_inf), [new for new, _ in present]
                part.add([kept._replace(found_inf=found, flags=flags, positions=new, kept=None)])
        return part

    def clear(self) -> None:
        """Forget all: the optimizer has stepped, or its gradients are gone."""
        self.found_inf = None
        self.measurements.clear()


class GradientBatch(NamedTuple):
    """Gradients that one kernel call takes; ``run`` calls one of the package's ops on them, by name."""

    device: torch.device
    layout: ShardLayout | None  # as a measurement's, and so the next
    positions: Sequence[int] | None
    run: Callable[..., Any]

    def measure(self, factor: Tensor, norm_type: float, *, divide: bool = False, write: bool) -> Measurement:
        """Measure gradients times ``factor``, or divided by it, which saves a launch; ``write``: in place."""
        op = "unscale_" if write else "norm_check"
        found: tuple[Tensor, Tensor, Tensor] = self.run(op, factor, norm_type, divide)
        return Measurement(*found, self.positions, self.layout)

    def multiply_(self, factor: Tensor) -> Tensor:
        """Multiply in place; returns whether a product is not finite, float32, 0-dim."""
        return self.run("multiply_", factor)  # type: ignore[no-any-return]


class GradientLedger:
    """Remembers which gradients were seen, by memory and version; the core has the same class in C++.

    Each call is given the same parameters: a reference to them would keep ``torch.utils.swap_tensors`` out.
    """

    GONE, SAME, CHANGED, NEW = -1, 0, 1, 2

    def __init__(self) -> None:
        self._marks: dict[int, list[_Mark]] = {}

    def count(self, params: list[Tensor]) -> int:
        """Return how many parameters have a gradient."""
        return sum(param.grad is not None for param in params)

    def remember(self, params: list[Tensor], slot: int) -> None:
        """Record the present gradients under ``slot``."""
        self._marks[slot] = [_mark(param.grad) for param in params]

    def compare(self, params: list[Tensor], slot: int) -> int:
        """Compare the present gradients with those recorded under ``slot``."""
        marks = self._marks.get(slot) or [None] * len(params)
        changes = [_change(param.grad, mark) for param, mark in zip(params, marks, strict=True)]
        return max(changes, default=self.SAME) or min(changes, default=self.SAME)

    def split(self, positions: Sequence[int]) -> GradientLedger:
        """Return a ledger of the parameters at ``positions``, with all that was recorded of them."""
        part = GradientLedger()
        part._marks = {slot: [marks[i] for i in positions] for slot, marks in self._marks.items()}
        return part

    def first_float16(self, params: list[Tensor]) -> int:
        """Return the position of the first parameter with a float16 gradient, -1 if there is none."""
        dtypes = (None if param.grad is None else param.grad.dtype for param in params)
        return next((i for i, dtype in enumerate(dtypes) if dtype is torch.float16), -1)

    def hooked(self, params: list[Tensor]) -> list[int]:
        """Return the positions of parameters with hooks that run once their gradient is there."""
        return [i for i, param in enumerate(params) if getattr(param, "_post_accumulate_grad_hooks", None)]


_Mark = tuple[Any, Any, int] | None  # a gradient's memory, held weakly, its place there, its version


def _mark(grad: Tensor | None) -> _Mark:
    if grad is None:
        return None
    version = 0 if grad.is_inference() else grad._version
    if grad.layout is not torch.strided:
        return torch._C._WeakTensorRef(grad), id(grad), version  # type: ignore[attr-defined]
    storage: Any = grad.untyped_storage()
    reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return reference, (storage._cdata, grad.storage_offset()), version


def _change(grad: Tensor | None, mark: _Mark) -> int:
    now = _mark(grad)
    if now is None:
        return GradientLedger.SAME if mark is None else GradientLedger.GONE
    if mark is None or mark[0].expired() or mark[1] != now[1]:
        return GradientLedger.NEW
    return GradientLedger.CHANGED if mark[2] != now[2] else GradientLedger.SAME


def make_ledger() -> Any:
    """Return a native ledger if the Python extension is loaded, else the Python one."""
    extension = native_core().extension
    return GradientLedger() if extension is None else extension.GradientLedger()


def batches_of(ledger: Any, params: list[Tensor]) -> list[GradientBatch]:
    """Return the present gradients of ``params``; a native ledger runs plain ones and shards itself."""
    if isinstance(ledger, GradientLedger):
        return batch_gradients(params)
    device, positions = ledger.survey(params)
    if device is not None:
        return [GradientBatch(device, None, positions, partial(_run_by_ledger, ledger, params))]
    groups = ledger.survey_shards(params)
    if groups is None or any(spec is not None and is_partial(spec.placements) for spec, _, _ in groups):
        return batch_gradients(params)
    found: dict[tuple[torch.device, ShardLayout | None], list[int]] = {}
    for spec, on, members in groups:
        layout = None if spec is None else ShardLayout.of(spec.mesh, spec.placements)
        found.setdefault((on, layout), []).extend(members)
    return [
        GradientBatch(on, layout, places, partial(_run_by_ledger, ledger, [params[i] for i in places]))
        for (on, layout), members in found.items()
        for places in [sorted(members)]
    ]


def _run_by_ledger(ledger: Any, params: list[Tensor], op: str, *arguments: Any) -> Any:
    return getattr(ledger, op)(params, *arguments)


def batch_gradients(params: Sequence[Tensor]) -> list[GradientBatch]:
    """Return the gradients of ``params``; odd kinds are replaced by their plain equal, in ``.grad`` too."""
    found: dict[tuple[torch.device, ShardLayout | None, Any], tuple[list[Tensor], list[int]]] = {}
    for position, param in enumerate(params):
        if param.grad is None:
            continue
        values, layout = local_gradient(param)
        values = _values_of(param, values)
        run = _run_with_duplicates if values.is_sparse else _run
        tensors, positions = found.setdefault((values.device, layout, run), ([], []))
        tensors.append(values)
        positions.append(position)
    return [
        GradientBatch(device, layout, positions, partial(run, tensors))
        for (device, layout, run), (tensors, positions) in found.items()
    ]


def _values_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the tensor to work on: a sparse one if it holds duplicates; float16 ones are added up first."""
    if grad.layout is torch.sparse_coo:
        if grad.dtype is torch.float16:
            grad = param.grad = grad.coalesce()
        return grad._values() if grad.is_coalesced() else grad
    if grad.layout in _COMPRESSED:
        return grad.values()
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return grad


def _run(tensors: list[Tensor], op: str, *arguments: Any) -> Any:
    return getattr(torch.ops.amp_plugin, op)(tensors, *arguments)


def _run_with_duplicates(grads: list[Tensor], op: str, *arguments: Any) -> Any:
    """Unscale before duplicates are added up, as torch.amp does: scaled sums may overflow."""
    grads = [grad.clone() for grad in grads] if op == "norm_check" else grads
    values = [grad._values() for grad in grads]
    if op == "multiply_":
        return _run(values, op, *arguments)
    factor, norm_type, _ = arguments
    _run(values, "unscale_", *arguments)
    sums = [grad.coalesce()._values() for grad in grads]
    return _run(sums, "norm_check", torch.ones_like(factor), norm_type, False)


def local_gradient(param: Tensor) -> tuple[Tensor, ShardLayout | None]:
    """Return this rank's part of ``param.grad``, and the layout of the whole; Partial ones are summed up."""
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
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- only tensor subclasses pay for it

    return isinstance(grad, DTensor)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    groups = optimizer.param_groups
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]


def parameter_layouts(params: Sequence[Tensor]) -> tuple[ShardLayout, ...]:
    """Return every layout that the gradients of ``params`` may have, in the same order on every rank."""
    sharded: list[Any] = [param for param in params if _is_dtensor(param)]
    return tuple(dict.fromkeys(ShardLayout.of(param.device_mesh, param.placements) for param in sharded))


def match_memory_order(optimizer: Optimizer) -> None:
    """Copy gradients and states whose strides differ from their parameter's, for a fused step on the CPU.

    It walks through memory, and would take the wrong elements. Hooks and ``autograd.grad`` leave such ones.
    """
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.is_cpu and p.dim()] if group.get("fused") else []
        for param in params:
            grad = param.grad
            if grad is not None and grad.layout is torch.strided and not _has_strides_of(grad, param):
                param.grad = _laid_out_as(param, grad, optimizer)
        _match_states(params, optimizer)


def _match_states(params: list[Tensor], optimizer: Optimizer) -> None:
    """Match the states too: all of a parameter are made in its order, so its first one shows a conversion."""
    states: Any = optimizer.state
    example = next((param for param in params if param in states), None)
    if example is None:
        return
    names = [
        name for name, value in states[example].items() if getattr(value, "shape", None) == example.shape
    ]
    for param in params if names else []:
        state = states.get(param, {})
        first = state.get(names[0])
        if first is not None and not _has_strides_of(first, param):
            state.update({name: _laid_out_as(param, state[name], optimizer) for name in names})


def _has_strides_of(tensor: Tensor, param: Tensor) -> bool:
    """Whether elements follow each other in memory as the parameter's do."""
    if tensor.stride() == param.stride():
        return True
    pairs = zip(tensor.stride(), param.stride(), param.shape, strict=True)
    return all(stride == other for stride, other, size in pairs if size != 1)


def _laid_out_as(param: Tensor, tensor: Tensor, optimizer: Optimizer) -> Tensor:
    copy = torch.empty_like(param, dtype=tensor.dtype, requires_grad=False)
    if not _has_strides_of(copy, param):
        msg = (
            f"{type(optimizer).__name__}: a parameter of shape {tuple(param.shape)} and strides "
            f"{param.stride()} has gaps between its elements, which torch's fused step on the CPU would "
            "write to: make it contiguous (param.data = param.data.contiguous()), or pass fused=False."
        )
        raise ValueError(msg)
    return copy.copy_(tensor)
