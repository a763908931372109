"""The dtypes of a model: of its weights and gradients, and of what goes through its modules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from torch import nn

from amp_plugin.casting.cast_table import FoldedName
from amp_plugin.casting.dtype_report import DtypeReport
from amp_plugin.casting.dtype_report import dtype_report as report_calls
from amp_plugin.precision import short_name
from amp_plugin.sharding.shard_units import ShardUnit, shard_units


class ModelDtypes(DtypeReport):
    """What a model computes, stores, gathers and reduces in; ``rich.print`` shows all of it.

    Attributes:
        units: Weights that travel together, the model itself last; one unit where nothing is sharded.
    """

    def __init__(self, calls: DtypeReport | None, units: Sequence[ShardUnit]) -> None:
        super().__init__([] if calls is None else calls.rows())
        self.units = tuple(units)

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
        """Say how much it holds."""
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
    calls = report_calls(model, *inputs, **named) if runs else None
    return ModelDtypes(calls, shard_units(model))


def _takes_nothing(model: nn.Module) -> bool:
    """Whether the model can be called without arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    optional = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [p for p in parameters if p.default is p.empty and p.kind not in optional]
    return not required and type(model).forward is not nn.Module.forward
