"""Which ops lose precision, and what of it arrives: each op of a program runs in fp32 or fp64, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Observer, Region, listed
from amp_plugin.numerics.rounding import COLUMNS, Errors, draw, short_op
from amp_plugin.numerics.values import ShadowValues, is_low_precision, unwatched

Key = tuple[str, str, str]  # module, op, direction

_DTYPES = (torch.float32, torch.float64)


class WideRun(Region, Observer):
    """A region whose ops run twice more, in a wide dtype: on the program's values, and without rounding."""

    def __init__(self, model: nn.Module | None, dtype: torch.dtype) -> None:
        self.shadows = ShadowValues(dtype)  # what the program's tensors would hold without rounding
        super().__init__(Tracker(model), self)

    def before(self, call: Call) -> None:
        """Widen the arguments: with the program's own values, and with those of the other run."""
        if call.traits.is_view or not call.is_repeatable:
            return
        shadows, copy = self.shadows, bool(call.traits.written)  # shadows are written by the results

        def exact(tensor: Tensor) -> Tensor:
            return tensor.to(
                shadows.wide(tensor.dtype) if shadows.follows(tensor) else tensor.dtype, copy=copy
            )

        def arriving(tensor: Tensor) -> Tensor:
            wide = shadows.of(tensor) if shadows.follows(tensor) else tensor
            return wide.clone() if copy else wide

        call.kept = call.changed(exact, shadows.dtype), call.changed(arriving, shadows.dtype)

    def after(self, call: Call, output: Any) -> None:
        """Run the op on both wide sides, take what they make, and write the results' shadows."""
        results = [made.tensor for made in call.made(output)]
        if call.traits.is_view or not any(map(self.shadows.follows, results)):
            return
        exact = arriving = None
        if call.kept is not None:
            exact = call.again(call.kept[0], results)
            arriving = None if exact is None else call.again(call.kept[1], results)
        elif call.reads and not call.traits.is_unwritten:
            call.count_unmeasured()
        wide = [(result, result) for result in results]  # it is taken as exact
        if exact is not None and arriving is not None:
            wide = list(zip(exact, arriving, strict=True))
        for result, (own, other) in zip(results, wide, strict=True):
            if self.shadows.follows(result):
                self.shadows.of(result).copy_(other)
                if result.numel():
                    self.take(call, result, None if arriving is None else own)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Look at a result that has a shadow, and at what the op makes of its inputs in the wide dtype.

        ``exact`` is None where the op does not run in the wide dtype.
        """


class ShadowRun(WideRun):
    """A region whose ops run in a wide dtype, too; see ``shadow_run``."""

    def __init__(self, model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in _DTYPES:
            msg = f"shadow_run(dtype={dtype}): give torch.float32, or torch.float64 for a program in fp32"
            raise ValueError(msg)
        self._errors: dict[Key, Errors] = {}
        super().__init__(model, dtype)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Add up the errors of 16-bit results."""
        if exact is not None and is_low_precision(result.dtype):
            key = (call.site.module, call.traits.name, call.direction)
            self._errors.setdefault(key, Errors()).add(result, exact, self.shadows.of(result))

    @property
    def is_empty(self) -> bool:
        """Whether no op returned a 16-bit result."""
        return not self._errors

    def errors(self) -> dict[Key, Errors]:
        """Return the errors of each (module, op, direction), the largest own error first."""
        return dict(sorted(self._errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor of the program would hold without rounding: a copy in the wide dtype.

        Args:
            tensor: dense, floating-point; one that no op of the region made has its own values.
        """
        with unwatched():
            return self.shadows.of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often ops could not be run again in the wide dtype; their results are taken as exact."""
        return {**self.recorder.unmeasured, **self.recorder.unseen}

    def table(self, rows: int | None = 20) -> Table:
        """Return a rich table, the largest own error first.

        Args:
            rows: how many; None for all.
        """
        errors = list(self.errors().items())
        table = Table(title="Errors", box=None, pad_edge=False, show_header=True)
        for column in ("module", "op", "pass"):
            table.add_column(column)
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for (module, op, direction), found in errors[:rows]:
            cells = (text(found) for text in COLUMNS.values())
            table.add_row(module or "(no module)", short_op(op), direction, *cells)
        hidden = len(errors) - len(errors[:rows])
        notes = [f"{hidden} rows with smaller errors"] if hidden else []
        if not errors:
            notes = ["no op returned a 16-bit result: was the code in an autocast block?"]
        if self.not_compared():
            notes.append(f"passed on as exact, not measured: {listed(self.not_compared())}")
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
        draw(dict(list(self.errors().items())[:rows]), Path(path))


def shadow_run(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> ShadowRun:
    """Run each op of a region in a wide dtype, too, and measure what 16 bits cost.

    Each op runs three times: as it is, in the wide dtype on the same inputs (the op's own error), and in the
    wide dtype on what a run without rounding would have given it (what arrives). Listed are ops that return
    16 bits. The program's own results are not changed. Memory: the wide values of every living tensor.

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
