"""Groups the gradients of an optimizer, so that one kernel call can unscale, check or clip a whole group.

A :class:`GradientBatch` is one group. All gradients of a group are on one device and have the same shard
layout. The kernel gets the values of a sparse gradient, and the local tensor of a DTensor. The native core
collects gradients about ten times as fast as Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels import ops  # noqa: F401 -- what batches run is registered there
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.loss_scale import LossScale, divisor_of, moved

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class ShardLayout(NamedTuple):
    """How a gradient is spread over ranks."""

    mesh: DeviceMesh
    sharded: tuple[bool, ...]  # for each mesh dimension: True if ranks along it hold different elements

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Any]) -> ShardLayout:
        """Return the layout of a DTensor. FSDP2 with tensor parallelism has its own placement classes."""
        return cls(mesh, tuple(not (kind.is_replicate() or kind.is_partial()) for kind in placements))

    def replicas(self) -> int:
        """Return the number of ranks that hold the same elements."""
        sizes = (self.mesh.size(dim) for dim, sharded in enumerate(self.sharded) if not sharded)
        return math.prod(sizes)


class Measurement(NamedTuple):
    """The result of one kernel call on a batch. ``norm`` is the norm of the gradients after unscaling."""

    norm: Tensor  # float32, 0-dim
    found_inf: Tensor  # 1.0 if a gradient is inf or nan, else 0.0 (float32, 0-dim)
    flags: Tensor  # for each gradient: bit 0 if it has an inf, bit 1 if it has a nan (uint8, 1-dim)
    params: Sequence[Tensor]  # the parameters of the measured gradients, in the order of the flags
    layout: ShardLayout | None = None  # None if every rank holds all of them

    def of(self, params: Sequence[Tensor]) -> Iterator[Measurement]:
        """Yield the part of the measurement that belongs to ``params``, if any."""
        wanted = {id(param) for param in params}
        rows = [i for i, param in enumerate(self.params) if id(param) in wanted]
        if rows:
            flags, own = self.flags[rows], [self.params[i] for i in rows]
            found_inf = flags.ne(0).any().to(self.found_inf.dtype)
            yield self._replace(found_inf=found_inf, flags=flags, params=own)


def joined(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Merge measurements of the same gradients. An overflow in any measurement is kept.

    Clipping by value turns inf into a finite number, so an overflow found before the clip must be kept.
    """
    kept: dict[Any, Measurement] = {}
    for new in measurements:
        key = (new.flags.device, *map(id, new.params))
        old = kept.get(key, new)
        found = torch.maximum(old.found_inf, new.found_inf)
        kept[key] = new._replace(flags=old.flags | new.flags, found_inf=found)
    return list(kept.values())


def forgotten_if_zero(earlier: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurements, but drop overflows of gradients that have since been set to zero or None.

    Setting gradients to zero discards a batch together with its overflows. There is no host sync.
    """
    kept = []
    for old in earlier:
        now = measured(list(old.params), None)
        if now:
            nonzero = [moved(found.norm.ne(0), old.flags.device) for found in now]
            counts = reduce(torch.logical_or, nonzero)
            kept.append(old._replace(flags=old.flags * counts, found_inf=old.found_inf * counts))
    return kept


class GradientBatch(NamedTuple):
    """Gradients for one kernel call. ``run(name, ...)`` calls the named op on the gradients."""

    device: torch.device
    layout: ShardLayout | None
    params: Sequence[Tensor]
    run: Callable[..., Any]


def measured(
    params: list[Tensor], scale: LossScale | Tensor | None, norm_type: float = 2.0, *, write: bool = False
) -> list[Measurement]:
    """Measure the norm and the overflows of gradients divided by a loss scale.

    If ``scale`` is a tensor (float32, 0-dim), the gradients are multiplied by that number instead. If
    ``write`` is True, the gradients are changed in place.
    """
    op, found = "unscale_" if write else "norm_check", []
    for batch in batches_of(params):
        factor, divide = (scale, False) if isinstance(scale, Tensor) else divisor_of(scale, batch.device)
        norm, found_inf, flags = batch.run(op, moved(factor, batch.device), norm_type, divide)
        found.append(Measurement(norm, found_inf, flags, batch.params, batch.layout))
    return found


def multiply_(
    params: list[Tensor], factor: Tensor, max_norm: float | None = None, found_inf: Tensor | None = None
) -> None:
    """Multiply the gradients of parameters in place by a 0-dim tensor.

    If ``max_norm`` is given, ``factor`` must be the norm of the gradients. The gradients are then clipped to
    ``max_norm`` instead, unless ``found_inf`` is 1.
    """
    for batch in batches_of(params):
        flag = None if found_inf is None else moved(found_inf, batch.device)
        batch.run("multiply_", moved(factor, batch.device), max_norm, flag)


def batches_of(params: list[Tensor]) -> list[GradientBatch]:
    """Return the current gradients of ``params`` in batches.

    If the native core is loaded, it collects gradients that are plain tensors or shards of DTensors.
    """
    extension = native_core().extension
    if extension is None:
        return batch_gradients(params)
    native = extension.GradientLedger
    device, positions = native.survey(params)
    if device is not None:
        present = params if positions is None else [params[i] for i in positions]
        return [GradientBatch(device, None, present, partial(_run, native, params))]
    groups = native.survey_shards(params)
    if groups is None or any(spec is not None and is_partial(spec.placements) for spec, _, _ in groups):
        return batch_gradients(params)
    found: dict[tuple[torch.device, ShardLayout | None], list[int]] = {}
    for spec, on, members in groups:
        layout = None if spec is None else ShardLayout.of(spec.mesh, spec.placements)
        found.setdefault((on, layout), []).extend(members)
    return [
        GradientBatch(on, layout, own, partial(_run, native, own))
        for (on, layout), members in found.items()
        for own in [[params[i] for i in sorted(members)]]
    ]


def first_float16(params: list[Tensor]) -> Tensor | None:
    """Return the first parameter with a float16 gradient."""
    extension = native_core().extension
    if extension is not None:
        position = extension.GradientLedger.first_float16(params)
        return None if position < 0 else params[position]
    return next((p for p in params if p.grad is not None and p.grad.dtype is torch.float16), None)


def batch_gradients(params: Sequence[Tensor]) -> list[GradientBatch]:
    """Group the gradients of ``params``, so that one kernel call can process all gradients of a group.

    Some gradients in ``.grad`` are first replaced by tensors that a kernel can process. A Partial DTensor is
    reduced, a float16 COO tensor is coalesced, and a lazily conjugated or negated tensor is resolved.
    """
    found: dict[tuple[torch.device, ShardLayout | None, Any], tuple[list[Tensor], list[Tensor]]] = {}
    for param in params:
        if param.grad is None:
            continue
        values, layout = local_gradient(param)
        values = _values_of(param, values)
        run = _run_with_duplicates if values.is_sparse else _run
        tensors, members = found.setdefault((values.device, layout, run), ([], []))
        tensors.append(values)
        members.append(param)
    return [
        GradientBatch(device, layout, members, partial(run, torch.ops.amp_plugin, tensors))
        for (device, layout, run), (tensors, members) in found.items()
    ]


def _values_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient, or the gradient itself if it has duplicate indices.

    In float16, duplicates are added first.
    """
    if grad.layout is torch.sparse_coo:
        if grad.dtype is torch.float16:
            grad = param.grad = grad.coalesce()
        return grad._values() if grad.is_coalesced() else grad
    if grad.layout in _COMPRESSED:
        return grad.values()
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return grad


def _run(library: Any, tensors: list[Tensor], op: str, *arguments: Any) -> Any:
    """Call an op on gradients. If ``library`` is the native class, its methods take parameters instead."""
    return getattr(library, op)(tensors, *arguments)


def _run_with_duplicates(library: Any, grads: list[Tensor], op: str, *arguments: Any) -> Any:
    """Unscale sparse values with the same index before they are added, as torch.amp does.

    Scaled sums may overflow.
    """
    grads = [grad.clone() for grad in grads] if op == "norm_check" else grads
    values = [grad._values() for grad in grads]
    if op == "multiply_":
        return _run(library, values, op, *arguments)
    factor, norm_type, _ = arguments
    _run(library, values, "unscale_", *arguments)
    sums = [grad.coalesce()._values() for grad in grads]
    return _run(library, sums, "norm_check", torch.ones_like(factor), norm_type, False)


def local_gradient(param: Tensor) -> tuple[Tensor, ShardLayout | None]:
    """Return this rank's part of ``param.grad``, and its shard layout. A Partial DTensor is reduced first."""
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
    """Return whether a DTensor has Partial placements, so that ranks hold summands of its elements."""
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
    """Return every layout that the gradients of ``params`` can have, in the same order on every rank."""
    sharded: list[Any] = [param for param in params if _is_dtensor(param)]
    return tuple(dict.fromkeys(ShardLayout.of(param.device_mesh, param.placements) for param in sharded))


def match_memory_order(optimizer: Optimizer) -> None:
    """Copy gradients and states whose strides differ from those of their parameter.

    torch's fused CPU step goes through memory in order, so it would combine the wrong elements. Hooks and
    ``autograd.grad`` can produce gradients with other strides.
    """
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.is_cpu and p.dim()] if group.get("fused") else []
        for param in params:
            grad = param.grad
            if grad is not None and grad.layout is torch.strided and not _has_strides_of(grad, param):
                param.grad = _laid_out_as(param, grad, optimizer)
        # Some optimizer wrappers have ``param_groups`` and ``step()``, but no ``state``.
        if params:
            _match_states(params, optimizer)


def _match_states(params: list[Tensor], optimizer: Optimizer) -> None:
    """Copy states whose strides differ from their parameter's.

    All states of a parameter have the same strides.
    """
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
    """Return whether a tensor has the parameter's strides, apart from dimensions of size 1."""
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
