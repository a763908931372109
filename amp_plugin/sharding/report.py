"""Reports the dtypes that a sharded model really uses, and compares them with a plan.

The dtypes are read from private attributes of torch's ``fully_shard`` and FullyShardedDataParallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text
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
from amp_plugin.weights.fsdp2 import gathered_dtypes, is_unit, policy_of_weight, weights_of_unit
from amp_plugin.weights.shard import local_of
from amp_plugin.weights.weight import half_of, stored_weight

Engine = Literal["fsdp2", "fsdp1", "ddp", "none"]
Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUnit:
    """An FSDP unit, whose weights are gathered together and whose gradients are reduced together.

    Attributes:
        name: The name of the module that was sharded, or ``""`` for the model itself.
        engine: What shards the unit: ``"fsdp2"``, ``"fsdp1"``, ``"ddp"`` (each rank holds all weights) or
            ``"none"``.
        stored: The dtypes in which the unit's trainable weights are stored between steps. If no weight is
            trainable, ``stored`` lists the dtypes of the frozen weights. If a weight is stored as a
            16-bit value and a remainder, ``stored`` contains the dtype of the 16-bit value. ``stored``
            contains several dtypes if some weights of the unit stay in float32.
        gathered: The dtype in which the unit's weights are gathered and used in forward, or ``torch.uint8``
            if torch gathers weights of several dtypes together, as bytes.
        reduced: The dtype in which the unit's gradients are reduced, or None if all its weights are frozen.
        parameters: The number of elements in the unit's weights before sharding. Under tensor parallelism,
            only this rank's elements are counted.
        local_bytes: The size of the unit's weights on this rank in bytes, including ``remainder_bytes``.
        remainder_bytes: The size in bytes of the remainders or float32 copies that belong to 16-bit weights.
        state: The format of the optimizer moments of the unit's trainable weights, which is ``"fp32"``,
            ``"bf16"`` or ``"8bit"``.
    """

    name: str
    engine: Engine
    stored: Dtypes
    gathered: torch.dtype
    reduced: torch.dtype | None
    parameters: int
    local_bytes: int
    remainder_bytes: int
    state: str


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return the FSDP units of a model, with each unit listed after the units inside it.

    For example, the order is ``blocks.0.norm``, ``blocks.0``, ``blocks.1`` and so on, and the model itself is
    last.
    """
    units = _fsdp_units(model)
    if not units:
        ddps = [pair for pair in model.named_modules() if isinstance(pair[1], DistributedDataParallel)]
        found = [_unit(clean_name(name), "ddp", [*module.parameters()]) for name, module in ddps]
        units = _inner_first(found or [_unit("", "none", [*model.parameters()])])
    return units


def _fsdp_units(model: nn.Module) -> list[ShardUnit]:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    named = [(clean_name(name), module) for name, module in model.named_modules()]
    units = [_fsdp2(name, module) for name, module in named if is_unit(module)]
    units += [_fsdp1(name, module) for name, module in named if isinstance(module, FullyShardedDataParallel)]
    return _inner_first(units)


def _inner_first(units: Iterable[ShardUnit | None]) -> list[ShardUnit]:
    """Sort FSDP units, so that each unit comes after the units inside it.

    ``units`` must be in the order of ``named_modules()``.
    """
    ordered: list[ShardUnit] = []
    # The units that contain the current unit, from the outermost to the innermost.
    around: list[ShardUnit] = []
    for unit in filter(None, units):
        while around and not _holds(around[-1], unit.name):
            ordered.append(around.pop())
        around.append(unit)
    return [*ordered, *reversed(around)]


def _holds(unit: ShardUnit, module: str) -> bool:
    return not unit.name or f"{module}.".startswith(f"{unit.name}.")


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
        # If the policy has no reduce_dtype, torch 2.15 reduces in the stored dtype.
        # Older releases reduce in the dtype in which weights are gathered.
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
    """Return the ShardUnit for the weights ``params``, or None if ``params`` is empty.

    If ``gathered`` or ``reduced`` is not given, the dtype in which the first weight is stored is used.
    """
    if not params:
        return None
    trained = [param for param in params if param.requires_grad]
    stored = tuple(dict.fromkeys(half_of(param).dtype for param in trained or params))
    dtypes = [*gathered] or [stored[0]]
    remainders = bytes_of([weight.kept for param in params if (weight := stored_weight(param)) is not None])
    return ShardUnit(
        name=name,
        engine=engine,
        stored=stored,
        gathered=dtypes[0] if len(dtypes) == 1 else torch.uint8,
        reduced=reduced or stored[0] if trained and engine != "none" else None,
        parameters=elements or sum(local_of(param).numel() for param in params),
        local_bytes=bytes_of([half_of(param) for param in params]) + remainders,
        remainder_bytes=remainders,
        state=" ".join(dict.fromkeys(asked_for(param) or "fp32" for param in trained or params)),
    )


# -- reports of dtypes -----------------


@dataclass(kw_only=True, slots=True)
class ModuleDtypes:
    """The dtypes of the inputs, outputs and weights in one call to a module.

    Attributes:
        module: The path of the module, or "" for the model itself.
        kind: The name of the module's class.
        inputs, outputs: The dtypes of the call's tensor arguments and results, in order. Tensors inside
            lists, tuples and dicts are included.
        weights: The distinct dtypes of the module's direct parameters.
    """

    module: str
    kind: str
    inputs: Dtypes
    outputs: Dtypes | None = None  # None while the module runs
    weights: Dtypes


class ModelDtypes:
    """The dtypes in which a model computes, stores its weights, and sends data. ``rich.print`` shows them.

    Attributes:
        units: The FSDP units, with the model itself last. A model that is not sharded is a single unit.
    """

    def __init__(self, units: Sequence[ShardUnit], calls: Sequence[ModuleDtypes] = ()) -> None:
        self.units, self._calls = units, calls

    def rows(self) -> list[ModuleDtypes]:
        """Return one entry for each call to a module, in the order of the calls."""
        return list(self._calls)

    def table(self) -> Table:
        """Return a rich table of the dtypes of each module's inputs, outputs and weights."""
        table = Table("module", "class", "in", "out", "weights", title="Dtypes")
        for row in self._calls:
            cells = (_text(dtypes) for dtypes in (row.inputs, row.outputs, row.weights))
            table.add_row(_Name(row.module or "(model)"), _Name(row.kind), *cells)
        return table

    def __rich__(self) -> Group:
        """Return a table of the FSDP units and, if modules were called, a table of the module calls."""
        titles = ("parameters", "stored", "gathered", "reduced", "bytes\nhere", "moments")
        # On a narrow screen, only names are shortened; these columns keep their full width.
        columns = (Column(title, no_wrap=True) for title in titles)
        pairs = any(unit.remainder_bytes for unit in self.units)
        table = Table(
            "unit",
            *columns,
            title="Weights",
            caption=_WITH_REMAINDERS if pairs else None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for unit in self.units:
            dtypes = map(_text, (unit.stored, (unit.gathered,), (unit.reduced,)))
            sizes = f"{unit.parameters:,}", f"{unit.local_bytes:,}"
            table.add_row(_Name(unit.name or "(model)"), sizes[0], *dtypes, sizes[1], unit.state)
        return Group(table, *([self.table()] if self._calls else []))


_WITH_REMAINDERS: Final = "the bytes of weights that are stored in 16 bits include their remainders"


class _Name:
    """A name in a table. If the table column is too narrow, an ellipsis replaces the middle of the name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._name), 9), len(self._name)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        name, left_out = self._name, len(self._name) - options.max_width
        if left_out > 0:
            head = (options.max_width - 1) // 2
            name = f"{name[:head]}…{name[head + left_out + 1 :]}"
        yield Text(name, no_wrap=True)


def _text(dtypes: Iterable[torch.dtype | None] | None) -> str:
    return " ".join("-" if dtype is None else short_name(dtype) for dtype in dtypes or ())


def dtype_report(model: nn.Module, *inputs: Any, **named: Any) -> ModelDtypes:
    """Report the dtypes of a model's weights and gradients, and of the inputs and outputs of its modules.

    If inputs are given, the model runs once under ``torch.no_grad()`` and the current autocast region, in its
    current training or evaluation mode. In training mode, buffers such as the running statistics of batch
    norm change. If no inputs are given, the model does not run and the report covers only its weights. The
    native core is not needed.

    Args:
        model: The model, which may be wrapped in DDP or FSDP, or sharded by ``fully_shard``. For a compiled
            module, the report shows inputs and outputs, but nothing about its submodules.
        *inputs: The positional arguments of the model.
        **named: The keyword arguments of the model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     report = dtype_report(model, torch.ones(1, 4))
        >>> [(row.kind, row.inputs, row.outputs) for row in report.rows()][1]
        ('Linear', (torch.float32,), (torch.bfloat16,))
        >>> [(unit.stored, unit.parameters) for unit in report.units]
        [((torch.float32,), 20)]
    """
    if not inputs and not named:
        return ModelDtypes(shard_units(model))
    with module_calls(model) as calls, torch.no_grad():
        model(*inputs, **named)
    return ModelDtypes(shard_units(model), calls)


@contextmanager
def module_calls(model: nn.Module) -> Iterator[list[ModuleDtypes]]:
    """Collect the dtypes of all module calls in a block, in the order of the calls.

    Calls that end with an exception are left out.
    """
    calls: list[ModuleDtypes] = []
    # Maps id(module) to the module's name.
    # A module cannot be the key itself, because some modules change their hash (torchmetrics metrics do).
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        weights = tuple(dict.fromkeys(param.dtype for param in module.parameters(recurse=False)))
        kind, inputs = type(module).__name__, _dtypes((args, kwargs))
        calls.append(ModuleDtypes(module=names[id(module)], kind=kind, inputs=inputs, weights=weights))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        for call in reversed(calls):
            if call.outputs is None and call.module == names[id(module)]:
                call.outputs = _dtypes(output)
                return
        # A module call that began before the block has no entry in ``calls``.

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


# -- check against a plan --------------

_SET: Final = {
    "fsdp2": "MixedPrecisionPolicy(reduce_dtype=torch.float32), or amp_plugin.fully_shard(model, plan)",
    "fsdp1": "MixedPrecision(reduce_dtype=torch.float32), or leave the policy out",
}


def check_against_plan(model: nn.Module, plan: DtypePlan) -> bool:
    """Check that FSDP uses the dtypes of a plan. Return True if FSDP shards the model at all.

    A warning is issued if gradients are reduced in 16 bits although the plan says fp32.

    Raises:
        ValueError: A weight of a module in ``fp32_modules`` is gathered in 16 bits.
    """
    units = _fsdp_units(model)
    if units and plan.fp32_modules:
        _refuse_rounded_weights(model, plan.in_fp32(model), units)
    rounded = [unit for unit in units if unit.reduced in HALVES and plan.reduce == "fp32"]
    for unit in rounded[:1]:
        warn_user(
            f"reduce='fp32' was given, but {len(rounded)} of {len(units)} FSDP units of "
            f"{type(model).__name__} (first {unit.name or 'the model'!r}) reduce gradients in "
            f"{unit.reduced}, as their own policy says: use {_SET[unit.engine]}, or give reduce='bf16'"
        )
    return bool(units)


def _refuse_rounded_weights(model: nn.Module, in_fp32: set[nn.Module], units: list[ShardUnit]) -> None:
    # Only FSDP2 can gather weights of one unit in several dtypes. FSDP1 gathers all of them in one dtype.
    of_weight = gathered_dtypes(model)
    for path, module in model.named_modules():
        owner = clean_name(path)
        holders = [unit for unit in units if _holds(unit, owner)]
        unit = max(holders, key=lambda holder: len(holder.name), default=None)
        if module not in in_fp32 or unit is None:
            continue
        gathered = {of_weight.get(param, unit.gathered) for param in module.parameters(recurse=False)}
        for dtype in gathered & HALVES:
            msg = (
                f"fp32_modules names {owner!r}, but the {unit.engine} unit {unit.name or 'model'!r} gathers "
                f"its weights in {dtype}: shard by amp_plugin.fully_shard(model, plan), which keeps them in "
                "fp32, or leave param_dtype out"
            )
            raise ValueError(msg)


# The names of collectives. The first name that occurs in torch's op name is used.
# Underscores are ignored, so ``_allgather_base_`` is an ``all_gather`` and ``isend`` is a ``send``.
_OPS: Final = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
# The namespaces of the ops that torch.distributed and DTensor call for collectives.
_NAMESPACES: Final = ("c10d", "_c10d_functional")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Collective:
    """One call to a collective by this rank.

    Attributes:
        op: The collective, such as ``"all_gather"`` or ``"reduce_scatter"``.
        dtype: The dtype of the data, such as ``"bf16"``.
        elements: The number of elements in the input or output on one rank, whichever is larger. For an
            all-gather the output is larger, and for a reduce-scatter the input is larger.
        ranks: The number of ranks in the process group of the call.
        bytes: The size of these elements in bytes.
    """

    op: str
    dtype: str
    elements: int
    ranks: int
    bytes: int


class CollectiveLog(list[Collective]):
    """The collectives that this process called in a block, in order."""

    def table(self) -> Table:
        """Return a rich table with one row for each distinct collective. Each row counts the calls."""
        table = Table("collective", "dtype", "elements", "bytes", "ranks", "calls", title="Collectives")
        for call, count in Counter(self).items():
            sizes = f"{call.elements:,}", f"{call.bytes:,}", str(call.ranks)
            table.add_row(call.op, call.dtype, *sizes, str(count))
        return table


@contextmanager
def log_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives that this process calls in a ``with`` block, including those of backward passes.

    Yields:
        The log. Each collective is added to the log when it is called. Barriers are left out. Recording
        causes no host sync.

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
    """Records collectives below autograd and autocast, where a tensor has the dtype in which it is sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = CollectiveLog()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record it if it is a collective.

        Ops on DTensors are left to DTensor, which calls this method again with ops on plain tensors.
        """
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
    else:
        # A functional collective has the group's name as its last string argument.
        # Its output is not among the arguments.
        name = [value for value in args if isinstance(value, str)][-1]
        group = vars(dist.distributed_c10d)["_resolve_process_group"](name)
        args = [*args, output]
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in args]
    dtype = next(leaf.dtype for side in sides for leaf in side)
    elements = max(sum(leaf.numel() for leaf in side) for side in sides)
    total = elements * dtype.itemsize
    return Collective(op=op, dtype=short_name(dtype), elements=elements, ranks=group.size(), bytes=total)
