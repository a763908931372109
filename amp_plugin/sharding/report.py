"""What torch makes of a plan: the dtypes of a model's weights and modules, shown, and checked against it.

What torch keeps of ``fully_shard`` and of FullyShardedDataParallel is read here and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from rich.console import Group
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_plugin.messages import warn_user
from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.weights.compressed_state import asked_for, bytes_of
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.fsdp2 import is_unit, policy_of_weight, weights_of_unit
from amp_plugin.weights.shard import local_of
from amp_plugin.weights.weight import half_of

Engine = Literal["fsdp2", "fsdp1", "ddp", "none"]
Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUnit:
    """Weights that are gathered, and whose gradients are reduced, by one collective each.

    Attributes:
        name: Of the module that was sharded; ``""`` is the model.
        engine: What shards it: ``"fsdp2"``, ``"fsdp1"``, ``"ddp"`` (whole on each rank), or ``"none"``.
        stored: Dtype of its trainable weights between steps; of its first weight if all are frozen. A weight
            that is stored in 16 bits has that dtype.
        gathered: Dtype in which its weights are gathered, and are in its forward; ``torch.uint8`` if several
            dtypes travel together, as bytes.
        reduced: Dtype in which its gradients are reduced; None if nothing in it is trained.
        parameters: Elements, of the whole unit (under tensor parallelism: of this rank's part of it).
        local_bytes: Of what this rank stores of its weights, the remainders of sharded ones too.
        state: How optimizers keep the moments of its trainable weights: ``"fp32"``, ``"bf16"`` or ``"8bit"``.
    """

    name: str
    engine: Engine
    stored: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    parameters: int
    local_bytes: int
    state: str


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return the units of a model, those that hold others last but one: the model itself is the last."""
    units = _fsdp_units(model)
    if not units:
        ddps = [pair for pair in model.named_modules() if isinstance(pair[1], DistributedDataParallel)]
        found = [_unit(clean_name(name), "ddp", [*module.parameters()]) for name, module in reversed(ddps)]
        units = [unit for unit in found or [_unit("", "none", [*model.parameters()])] if unit is not None]
    return units


def _fsdp_units(model: nn.Module) -> list[ShardUnit]:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    named = [(clean_name(name), module) for name, module in model.named_modules()]
    units = [_fsdp2(name, module) for name, module in named if is_unit(module)]
    units += [_fsdp1(name, module) for name, module in named if isinstance(module, FullyShardedDataParallel)]
    return [unit for unit in reversed(units) if unit is not None]


def _fsdp2(name: str, module: Any) -> ShardUnit | None:
    from amp_plugin.sharding.fully_shard import has_dtypes_by_parameter  # noqa: PLC0415 - loads FSDP

    params = weights_of_unit(module)
    policy = module._get_fsdp_state()._mp_policy
    own = [policy_of_weight(module, param) for param in params]
    return _unit(
        name,
        "fsdp2",
        [param.sharded_param for param in params],
        elements=sum(param._orig_size.numel() for param in params),
        gathered={o.param_dtype or p.sharded_param.dtype for o, p in zip(own, params, strict=True)},
        # Where nobody said, newer torch reduces in the dtype that is stored.
        reduced=policy.reduce_dtype or (None if has_dtypes_by_parameter() else policy.param_dtype),
    )


def _fsdp1(name: str, module: Any) -> ShardUnit | None:
    flat, policy = module._flat_param, module.mixed_precision
    if flat is None:
        return None
    gathered, elements = policy.param_dtype or flat.dtype, sum(size.numel() for size in flat._shapes)
    return _unit(name, "fsdp1", [flat], elements, {gathered}, policy.reduce_dtype or gathered)


def _unit(
    name: str,
    engine: Engine,
    params: Sequence[Tensor],
    elements: int | None = None,
    gathered: Iterable[torch.dtype] = (),
    reduced: torch.dtype | None = None,
) -> ShardUnit | None:
    """Return the unit of some weights, none without any; dtypes that nobody set are the stored one."""
    if not params:
        return None
    trained = [param for param in params if param.requires_grad]
    stored = half_of((trained or params)[0]).dtype
    dtypes = [*gathered] or [stored]
    return ShardUnit(
        name=name,
        engine=engine,
        stored=stored,
        gathered=dtypes[0] if len(dtypes) == 1 else torch.uint8,
        reduced=reduced or stored if trained and engine != "none" else None,
        parameters=elements or sum(local_of(param).numel() for param in params),
        local_bytes=bytes_of(params),
        state=" ".join(dict.fromkeys(asked_for(param) or "fp32" for param in trained or params)),
    )


# -- shown ---------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class ModuleDtypes:
    """One call of one module.

    Attributes:
        module: its path; empty for the model itself.
        kind: its class.
        inputs, outputs: dtypes of its tensor arguments and results, in order, nested ones too.
        weights: dtypes of its own parameters, each once.
    """

    module: str
    kind: str
    inputs: Dtypes
    outputs: Dtypes | None = None  # while it runs
    weights: Dtypes


class ModelDtypes:
    """What a model computes, stores, gathers and reduces in; ``rich.print`` shows all of it.

    Attributes:
        units: Weights that travel together, the model itself last; one unit where nothing is sharded.
    """

    def __init__(self, units: Sequence[ShardUnit], calls: Sequence[ModuleDtypes] = ()) -> None:
        self.units, self._calls = units, calls

    def rows(self) -> list[ModuleDtypes]:
        """Return one entry per call of a module, in the order they were entered."""
        return list(self._calls)

    def table(self) -> Table:
        """Return a rich table of what went into and came out of modules."""
        names = (Column(name, overflow="fold") for name in ("module", "class"))
        table = Table(*names, "in", "out", "weights", title="Dtypes")
        for row in self._calls:
            cells = (_text(dtypes) for dtypes in (row.inputs, row.outputs, row.weights))
            table.add_row(row.module or "(model)", row.kind, *cells)
        return table

    def __rich__(self) -> Group:
        """Return the units and, if modules were called, what went through them."""
        columns = ("parameters", "stored", "gathered", "reduced", "bytes here", "moments")
        table = Table(Column("unit", overflow="fold"), *columns, title="Weights")
        for unit in self.units:
            dtypes = map(_text, ((unit.stored,), (unit.gathered,), (unit.reduced,)))
            name = unit.name or "(model)"
            table.add_row(name, f"{unit.parameters:,}", *dtypes, f"{unit.local_bytes:,}", unit.state)
        return Group(table, *([self.table()] if self._calls else []))


def _text(dtypes: Iterable[torch.dtype | None] | None) -> str:
    return " ".join("-" if dtype is None else short_name(dtype) for dtype in dtypes or ())


def dtype_report(model: nn.Module, *inputs: Any, **named: Any) -> ModelDtypes:
    """Report the dtypes of a model: of weights and gradients, and in and out of its modules.

    With inputs the model runs once, without gradients, in whatever region the caller is in, and in the
    model's mode: in training mode buffers such as batch norm's statistics move. Without, nothing runs.
    Works without the native core.

    Args:
        model: Whole, or wrapped by DDP or FSDP, or sharded; of a compiled module only the outside is seen.
        *inputs: The model's arguments.
        **named: The same, by name.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     report = dtype_report(model, torch.ones(1, 4))
        >>> [(row.kind, row.inputs, row.outputs) for row in report.rows()][1]
        ('Linear', (torch.float32,), (torch.bfloat16,))
        >>> [(unit.stored, unit.parameters) for unit in report.units]
        [(torch.float32, 20)]
    """
    if not inputs and not named:
        return ModelDtypes(shard_units(model))
    with module_calls(model) as calls, torch.no_grad():
        model(*inputs, **named)
    return ModelDtypes(shard_units(model), calls)


@contextmanager
def module_calls(model: nn.Module) -> Iterator[list[ModuleDtypes]]:
    """Collect what goes into and out of each call of a module, as entered; those in an error are dropped."""
    calls: list[ModuleDtypes] = []
    names = {id(module): name for name, module in model.named_modules()}  # the hash of a metric changes

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        weights = tuple(dict.fromkeys(param.dtype for param in module.parameters(recurse=False)))
        kind, inputs = type(module).__name__, _dtypes((args, kwargs))
        calls.append(ModuleDtypes(module=names[id(module)], kind=kind, inputs=inputs, weights=weights))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        for call in reversed(calls):
            if call.outputs is None and call.module == names[id(module)]:
                call.outputs = _dtypes(output)
                return  # else it was entered before the block

    modules = list(model.modules())
    hooks = [module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        calls[:] = [call for call in calls if call.outputs is not None]


def _dtypes(values: Any) -> Dtypes:
    return tuple(value.dtype for value in tree_leaves(values) if isinstance(value, Tensor))


# -- checked -------------------------------------------------------------------------------------

_SET: Final = {
    "fsdp2": "MixedPrecisionPolicy(reduce_dtype=torch.float32), or amp_plugin.fully_shard(model, plan)",
    "fsdp1": "MixedPrecision(reduce_dtype=torch.float32), or leave the policy out",
}


def check_against_plan(model: nn.Module, plan: DtypePlan) -> bool:
    """Compare what FSDP was told with a plan; return whether FSDP shards the model at all."""
    units = _fsdp_units(model)
    if units and plan.fp32_modules:
        _refuse_rounded_weights(model, plan.in_fp32(model), units)
    rounded = [unit for unit in units if unit.reduced in HALVES and plan.reduce == "fp32"]
    for unit in rounded[:1]:
        warn_user(
            f"{len(rounded)} of {len(units)} units of {type(model).__name__}, {unit.name or 'the model'!r} "
            f"the first, reduce gradients in {unit.reduced}, as their own policy says, while reduce='fp32': "
            f"use {_SET[unit.engine]}, or say reduce='bf16'"
        )
    return bool(units)


def _refuse_rounded_weights(model: nn.Module, in_fp32: set[nn.Module], units: list[ShardUnit]) -> None:
    for path, module in model.named_modules():
        owner, has_weights = clean_name(path), any(True for _ in module.parameters(recurse=False))
        holders = [unit for unit in units if not unit.name or f"{owner}.".startswith(f"{unit.name}.")]
        unit = max(holders, key=lambda holder: len(holder.name), default=None)
        if module in in_fp32 and has_weights and unit is not None and unit.gathered in HALVES:
            msg = (
                f"fp32_modules names {owner!r}, but the {unit.engine} unit {unit.name or 'model'!r} gathers "
                f"its weights in {unit.gathered}: shard by amp_plugin.fully_shard(model, plan), which gives "
                "it a unit in fp32, or leave param_dtype out"
            )
            raise ValueError(msg)


# The first that is in torch's name counts, underscores aside: ``_allgather_base_``, ``isend``.
_OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
_NAMESPACES: Final = ("c10d", "_c10d_functional")  # of what torch.distributed calls, and DTensor


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Collective:
    """One call of a collective.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ...
        dtype: Of what it carries, ``"bf16"`` for example.
        elements: Of the whole, on one rank: what an all-gather returns, what a reduce-scatter takes.
        ranks: In its group.
        bytes: Of the elements.
    """

    op: str
    dtype: str
    elements: int
    ranks: int
    bytes: int


class CollectiveLog(list[Collective]):
    """The collectives that ran in a block, in order."""

    def table(self) -> Table:
        """Return a rich table, equal calls in one row."""
        table = Table("collective", "dtype", "elements", "bytes", "ranks", "calls", title="Collectives")
        for call, count in Counter(self).items():
            sizes = f"{call.elements:,}", f"{call.bytes:,}", str(call.ranks)
            table.add_row(call.op, call.dtype, *sizes, str(count))
        return table


@contextmanager
def log_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives of this process in a block, those of a backward pass too.

    Yields:
        The log, filled as they are called; barriers are left out. Nothing waits for a device.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with log_collectives() as log:
        ...     dist.all_reduce(torch.ones(3))
        >>> [(call.op, call.dtype, call.elements) for call in log]
        [('all_reduce', 'fp32', 3)]
        >>> dist.destroy_process_group()
    """
    with _Recorder() as recorder:
        yield recorder.log


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees ops below autograd and autocast, where collectives carry what they carry."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = CollectiveLog()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective; a DTensor's op comes back as those it is made of."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        op = _op_of(func) if getattr(func, "namespace", "") in _NAMESPACES else None
        if op is not None:
            self.log.append(_collective(op, [*args, *(kwargs or {}).values()], output))
        return output


def _op_of(func: Any) -> str | None:
    name = func._opname.replace("_", "")
    return next((op for op in _OPS if op.replace("_", "") in name), None)


def _collective(op: str, args: list[Any], output: Any) -> Collective:
    groups = [value for value in args if isinstance(value, torch.ScriptObject)]
    groups = [value for value in groups if "ProcessGroup" in str(value._type())]
    if groups:
        group = dist.ProcessGroup.unbox(groups[0])
    else:  # a functional collective: the last text is the group's name, and args do not hold the output
        name = [value for value in args if isinstance(value, str)][-1]
        group = vars(dist.distributed_c10d)["_resolve_process_group"](name)
        args = [*args, output]
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in args]
    dtype = next(leaf.dtype for side in sides for leaf in side)
    elements = max(sum(leaf.numel() for leaf in side) for side in sides)
    total = elements * dtype.itemsize
    return Collective(op=op, dtype=short_name(dtype), elements=elements, ranks=group.size(), bytes=total)
