"""See which dtypes go into and come out of each module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.cast_table import FoldedName
from amp_plugin.precision import short_name

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


class DtypeReport:
    """The dtypes of one forward pass, in the order modules were entered."""

    def __init__(self, rows: list[ModuleDtypes]) -> None:
        self._rows = rows

    def rows(self) -> list[ModuleDtypes]:
        """Return one entry per call of a module."""
        return list(self._rows)

    def table(self) -> Table:
        """Return a rich table."""
        table = Table("module", "class", "in", "out", "weights", title="Dtypes")
        for row in self._rows:
            cells = (" ".join(map(short_name, dtypes)) for dtypes in (row.inputs, row.outputs, row.weights))
            table.add_row(FoldedName(row.module or "(model)"), FoldedName(row.kind), *cells)
        return table

    def __repr__(self) -> str:
        return f"DtypeReport({len(self._rows)} module calls)"


def dtype_report(model: nn.Module, *inputs: Any, **named: Any) -> DtypeReport:
    """Run a model once, without gradients, and report the dtypes in and out of each module.

    The pass runs in whatever region the caller is in, and in the model's mode: in training mode
    buffers such as batch norm's statistics move. Works without the native core.

    Args:
        model: eager; of a compiled module only the outside is seen.
        *inputs: the model's arguments.
        **named: the same, by name.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     report = dtype_report(model, torch.ones(1, 4))
        >>> [(row.kind, row.inputs, row.outputs) for row in report.rows()][1]
        ('Linear', (torch.float32,), (torch.bfloat16,))
    """
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
    return DtypeReport([row for row in rows if row is not None])


def _dtypes(values: Any) -> Dtypes:
    return tuple(value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor))
