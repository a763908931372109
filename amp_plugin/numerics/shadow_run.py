"""Which ops lose precision, and what of it arrives: a program beside itself in fp32 or fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_region import OpRegion
from amp_plugin.numerics.rounding_errors import Errors
from amp_plugin.numerics.shadow import Key, Shadow
from amp_plugin.numerics.unwatched import unwatched
from amp_plugin.precision import short_name

_DTYPES = (torch.float32, torch.float64)


class ShadowRun(OpRegion):
    """A region whose ops run in a wide dtype, too; see ``shadow_run``."""

    def __init__(self, model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in _DTYPES:
            msg = f"shadow_run(dtype={dtype}): give torch.float32, or torch.float64 for a program in fp32"
            raise ValueError(msg)
        self._shadow = Shadow(dtype, ModulePaths(model))
        super().__init__(self._shadow)

    def errors(self) -> dict[Key, Errors]:
        """Return the errors of each (module, op, direction), the largest own error first."""
        return dict(sorted(self._shadow.errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor of the program would hold without rounding: a copy in the wide dtype.

        Args:
            tensor: dense, floating-point; one that no op of the region made has its own values.
        """
        with unwatched():
            return self._shadow.value_of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often ops could not be run again in the wide dtype; their results are taken as exact."""
        return dict(self._shadow.not_compared)

    def table(self, rows: int | None = 20) -> Table:
        """Return a rich table, the largest own error first.

        Args:
            rows: how many; None for all.
        """
        errors = list(self.errors().items())
        table = Table(title="Errors", box=None, pad_edge=False, show_header=True)
        for column in ("module", "op", "pass", "in"):
            table.add_column(column)
        for column in ("calls", "own", "own/eps", "arriving", "underflow", "headroom"):
            table.add_column(column, justify="right", no_wrap=True)
        for (module, op, direction), found in errors[:rows]:
            table.add_row(*_cells(module, op, direction, found))
        hidden = len(errors) - len(errors[:rows])
        notes = [f"{hidden} rows with smaller errors"] if hidden else []
        if not errors:
            notes = ["no op returned a 16-bit result: was the code in an autocast block?"]
        if self.not_compared():
            ops = (f"{op} ({calls} {_plural('call', calls)})" for op, calls in self.not_compared().items())
            notes.append(f"passed on as exact, not measured: {', '.join(ops)}")
        table.caption = "; ".join(notes) or None
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values, histograms of exponents included."""
        rows = [
            {"module": module, "op": op, "pass": direction, **errors.to_dict()}
            for (module, op, direction), errors in self.errors().items()
        ]
        return {"rows": rows, "not_compared": self.not_compared()}

    def plot(self, path: str | Path, *, rows: int = 20) -> None:
        """Draw errors and exponents of the rows with the largest own error.

        Args:
            path: a file; its ending says the format.
            rows: how many.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from amp_plugin.numerics.error_plot import draw  # noqa: PLC0415 - loads matplotlib

        draw(dict(list(self.errors().items())[:rows]), Path(path))


def shadow_run(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> ShadowRun:
    """Run each op of a region in a wide dtype, too, and measure what 16 bits cost.

    Each op runs three times: as it is, in the wide dtype on the same inputs (the op's own error), and in the
    wide dtype on what a run without rounding would have given it (what arrives). Listed are ops that return
    16 bits.
    The program's own results are not changed. Memory: the wide values of every living tensor, beside it.

    Ops that draw numbers from tensors, collectives, and ops without a kernel for the wide dtype are not
    measured, and pass their results on as exact; ``not_compared()`` counts them. Of a DTensor each rank
    measures its own shard.

    Args:
        model: gives the module names; default: whatever module is called, its class in front.
        dtype: the wide dtype, ``torch.float32`` or ``torch.float64``.

    Returns:
        A context manager; read it with ``errors()``, ``table()``, ``to_dict()`` and ``plot(path)``.

    Raises:
        ValueError: another dtype.

    Example:
        >>> with shadow_run() as run:
        ...     y = torch.tensor([1.0, 1e-9]).half()
        >>> [(op, errors.underflowed) for (_, op, _), errors in run.errors().items()]
        [('aten::_to_copy.default', 1)]
    """
    return ShadowRun(model, dtype=dtype)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _cells(module: str, op: str, direction: str, errors: Errors) -> tuple[str, ...]:
    return (
        module or "(no module)",
        op.removeprefix("aten::").removesuffix(".default"),
        direction,
        short_name(errors.narrow),
        f"{errors.calls:,}",
        f"{errors.own:.1e}",
        f"{errors.own_in_eps:.2f}",
        f"{errors.arriving:.1e}",
        f"{errors.underflowed / errors.elements:.1%}",
        f"{errors.headroom:.1f} bits",
    )
