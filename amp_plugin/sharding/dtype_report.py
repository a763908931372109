"""The dtypes of a model: of its weights and gradients, and of what goes through its modules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.cast_log import FoldedName
from amp_plugin.precision import short_name
from amp_plugin.sharding.shard_units import ShardUnit, shard_units

Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
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
    outputs: Dtypes
    weights: Dtypes


class ModelDtypes:
    """What a model computes, stores, gathers and reduces in; ``rich.print`` shows all of it.

    Attributes:
        units: Weights that travel together, the model itself last; one unit where nothing is sharded.
    """

    def __init__(self, rows: Sequence[ModuleDtypes], units: Sequence[ShardUnit]) -> None:
        self._rows = tuple(rows)
        self.units = tuple(units)

    def rows(self) -> list[ModuleDtypes]:
        """Return one entry per call of a module, in the order they were entered."""
        return list(self._rows)

    def table(self) -> Table:
        """Return a rich table of what went into and came out of modules."""
        table = Table("module", "class", "in", "out", "weights", title="Dtypes")
        for row in self._rows:
            cells = (" ".join(map(short_name, dtypes)) for dtypes in (row.inputs, row.outputs, row.weights))
            table.add_row(FoldedName(row.module or "(model)"), FoldedName(row.kind), *cells)
        return table

    def units_table(self) -> Table:
        """Return a rich table of the units."""
        table = Table("unit", "parameters", "stored", "gathered", "reduced", "bytes here", title="Weights")
        for unit in self.units:
            table.add_row(
                FoldedName(unit.name or "(model)"),
                f"{unit.parameters:,}",
                short_name(unit.stored),
                short_name(unit.gathered),
                "-" if unit.reduced is None else short_name(unit.reduced),
                f"{unit.local_bytes:,}",
            )
        return table

    def __rich__(self) -> Group:
        """Return all tables that have rows."""
        return Group(self.units_table(), *([self.table()] if self.rows() else []))

    def __repr__(self) -> str:
        """Return how much it holds, in words."""
        return f"ModelDtypes({len(self.units)} units, {len(self.rows())} module calls)"


def dtype_report(model: nn.Module, *inputs: Any, **named: Any) -> ModelDtypes:
    """Report the dtypes of a model: of weights and gradients, and in and out of its modules.

    With inputs the model runs once, without gradients, in whatever region the caller is in, and in the
    model's mode: in training mode buffers such as batch norm's statistics move. Without, nothing runs
    unless the model takes no inputs. Works without the native core.

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
    runs = bool(inputs or named) or _takes_nothing(model)
    return ModelDtypes(_calls(model, inputs, named) if runs else [], shard_units(model))


def _calls(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[ModuleDtypes]:
    """Run a model once, without gradients, and note what goes into and comes out of each module."""
    rows: list[ModuleDtypes | None] = []
    open_calls: list[tuple[int, Dtypes]] = []
    names = {module: name for name, module in model.named_modules()}

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        open_calls.append((len(rows), _dtypes((args, kwargs))))
        rows.append(None)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        place, taken = open_calls.pop()
        rows[place] = ModuleDtypes(
            module=names[module],
            kind=type(module).__name__,
            inputs=taken,
            outputs=_dtypes(output),
            weights=tuple(dict.fromkeys(param.dtype for param in module.parameters(recurse=False))),
        )

    hooks = [module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        with torch.no_grad():
            model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return [row for row in rows if row is not None]


def _takes_nothing(model: nn.Module) -> bool:
    """Whether the model can be called without arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    optional = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [p for p in parameters if p.default is p.empty and p.kind not in optional]
    return not required and type(model).forward is not nn.Module.forward


def _dtypes(values: Any) -> Dtypes:
    return tuple(value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor))
