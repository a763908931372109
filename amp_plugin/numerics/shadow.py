"""Which ops lose precision, and what of it arrives: each op of a program runs in fp32 or fp64, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amp_plugin.hardware import in_widest_float
from amp_plugin.numerics.advise import cures_of
from amp_plugin.numerics.formats import FormatLog
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region, listed
from amp_plugin.numerics.values import ShadowValues, as_json, distance, is_low_precision, unwatched
from amp_plugin.precision import short_name

Key = tuple[str, str, str]  # module, op, direction

_JUMP_TO, _JUMP_BY = 0.05, 10.0  # an arriving error that stands out, and by which factor over those before


@dataclass(kw_only=True, slots=True)
class Errors:
    """Errors of the calls of one op in one module.

    Attributes:
        calls: how many calls were compared.
        own: of the op alone: mean over the elements of |result - exact| / |exact|, where exact is the same op
            in the wide dtype on the same inputs; rounding once gives a quarter of the dtype's eps, an
            underflow 1. Worst call.
        arriving: of all ops so far: norm(result - other) / norm(other), where other is the same op of a run
            that rounds nothing. Worst call.
        largest: the largest magnitude of a finite result.
        narrow: the dtype of the results, of several that with the smallest range.
        elements: in all results.
        underflowed: results that are 0 though the exact ones are not.
    """

    calls: int = 0
    own: float = 0.0
    arriving: float = 0.0
    largest: float = 0.0
    narrow: torch.dtype = torch.float32
    elements: int = 0
    underflowed: int = 0

    def add(self, result: Tensor, exact: Tensor, arriving: Tensor) -> None:
        """Add a result, what the op makes of the same inputs in the wide dtype, and the other run's."""
        values = result.to(exact.dtype)
        self.calls += 1
        self.own = max(self.own, _mean_relative_error(values, exact))
        self.arriving = max(self.arriving, distance(values, arriving))
        self.narrow = min(self.narrow, result.dtype, key=lambda dtype: torch.finfo(dtype).max)
        self.largest = max(self.largest, float(torch.where(values.isfinite(), values.abs(), 0.0).max()))
        self.elements += values.numel()
        self.underflowed += int(((values == 0) & (exact != 0)).sum())

    @property
    def own_in_eps(self) -> float:
        """The op's own error in units of its dtype's eps: 0.25 is rounding, 1 and more is not."""
        return self.own / torch.finfo(self.narrow).eps

    @property
    def headroom(self) -> float:
        """Powers of two between the largest result and the largest number of its dtype."""
        return math.log2(torch.finfo(self.narrow).max / self.largest) if self.largest else math.inf

    def cells(self) -> dict[str, str]:
        """Return what a row of a table shows, by column."""
        return {
            "in": short_name(self.narrow),
            "calls": f"{self.calls:,}",
            "own": f"{self.own:.1e}",
            "own/eps": f"{self.own_in_eps:.2f}",
            "arriving": f"{self.arriving:.1e}",
            "underflow": f"{self.underflowed / self.elements:.1%}",
            "headroom": f"{self.headroom:.1f} bits",
        }


def _told(key: Key, before: float, after: float) -> str:
    """Return an op by which much more error arrives than before it, in words, with what to do."""
    where = f" in {key[0]}" if key[0] else ""
    return (
        f"the arriving error jumps from {before:.1e} to {after:.1e} at {key[1]}{where}: its inputs need more "
        "digits than they have; compute them in fp32"
    )


def _mean_relative_error(values: Tensor, exact: Tensor) -> float:
    """Return the mean of |values - exact| / |exact|, at most 1 per element, where ``exact`` is finite."""
    finite = exact.isfinite()
    values, exact = in_widest_float(values[finite]), in_widest_float(exact[finite])
    difference = (values - exact).abs()
    relative = torch.where(difference == 0, 0.0, difference / exact.abs()).nan_to_num(nan=1.0)
    return float(relative.clamp(max=1.0).mean()) if relative.numel() else 0.0


class WideRun(Region):  # type: ignore[no-untyped-call]
    """A region whose ops run twice more, in a wide dtype: on the program's values, and without rounding."""

    def __init__(self, model: nn.Module | None, dtype: torch.dtype) -> None:
        self.shadows = ShadowValues(dtype)  # what the program's tensors would hold without rounding
        tracker = Tracker(model)
        self.formats = FormatLog(tracker)  # of layers below 16 bits
        super().__init__(tracker, self.formats, self)

    def before(self, call: Call) -> None:
        """Widen the arguments: with the program's own values, and with those of the other run."""
        if call.traits.is_view or not call.is_repeatable:
            return
        shadows, copy = self.shadows, bool(call.traits.written)  # shadows are written by the results

        def arriving(tensor: Tensor) -> Tensor:
            wide = shadows.of(tensor) if shadows.follows(tensor) else tensor
            return wide.clone() if copy else wide

        exact = partial(shadows.plain, copy=copy)
        call.keep([call.changed(change, shadows.dtype) for change in (exact, arriving)])

    def after(self, call: Call, output: Any) -> None:
        """Run the op on both wide sides, take what they make, and write the results' shadows."""
        results = [made.tensor for made in call.made(output)]
        if call.traits.is_collective:
            self.exchanged(call, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
            return
        if call.traits.is_view or not any(map(self.shadows.follows, results)):
            return
        own = others = None
        if call.kept:
            own = call.again(call.kept[0], results)
            others = own and call.again(call.kept[1], results)
        elif not call.traits.is_unwritten and {a.name for a in call.arguments} - call.traits.overwritten:
            call.count_unmeasured()
        if others is None:  # it is taken as exact
            own, others = None, results
        for number, result in enumerate(results):
            if self.shadows.follows(result):
                self.shadows.of(result).copy_(others[number])
                if result.numel():
                    self.take(call, result, None if own is None else own[number])

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Forget the shadows of a collective's results, which may still be on their way from other ranks.

        They get new ones, of their own values, when an op reads them.
        """
        if any(map(self.shadows.follows, results)) and not call.traits.waits:
            call.count_unmeasured()
        for result in results:
            self.shadows.discard(result)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Look at a result with a shadow, and at the op's own in the wide dtype, None where it has none."""


class ShadowRun(WideRun):  # type: ignore[no-untyped-call]
    """A region whose ops run in a wide dtype, too; see ``shadow_run``."""

    def __init__(self, model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in {torch.float32, torch.float64}:
            msg = f"shadow_run(dtype={dtype}): give torch.float32, or torch.float64 for a program in fp32"
            raise ValueError(msg)
        self._errors: dict[Key, Errors] = {}
        super().__init__(model, dtype)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Add up the errors of 16-bit results."""
        if exact is not None and is_low_precision(result.dtype):
            key = (call.site.module, call.traits.name, call.direction)
            self._errors.setdefault(key, Errors()).add(result, exact, self.shadows.of(result))

    def errors(self) -> dict[Key, Errors]:
        """Return the errors of each (module, op, direction), the largest own error first."""
        return dict(sorted(self._errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def jump(self) -> tuple[Key, float] | None:
        """Return the op of the forward pass by which the arriving error grows most; None if none stands out.

        Ops are taken in the order in which they first ran, each against the largest error before it.

        Returns:
            The key of the op in :meth:`errors`, and the largest arriving error of the ops before it.
        """
        before, most, found = 0.0, 0.0, None
        for key, errors in self._errors.items():
            if key[2] == "backward":
                continue
            stands_out = before and errors.arriving > max(_JUMP_TO, _JUMP_BY * before)
            if stands_out and (found is None or errors.arriving / before > most):
                most, found = errors.arriving / before, (key, before)
            if math.isfinite(errors.arriving):
                before = max(before, errors.arriving)
        return found

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor of the program would hold without rounding: a copy in the wide dtype.

        Args:
            tensor: dense, floating-point; one that no op of the region made has its own values.
        """
        with unwatched():
            return self.shadows.of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often ops could not be run again in the wide dtype; their results are taken as exact."""
        return dict(self.unseen)

    def table(self, rows: int | None = 20) -> Table:
        """Return a rich table, the largest own error first.

        Args:
            rows: how many; None for all.
        """
        errors = list(self.errors().items())
        table = Table("module", "op", "pass", title="Errors", box=None, pad_edge=False)
        for column in Errors(elements=1).cells():
            table.add_column(column, justify="right", no_wrap=True)
        for (module, op, direction), found in errors[:rows]:
            name = op.removeprefix("aten::").removesuffix(".default")
            table.add_row(module or "(no module)", name, direction, *found.cells().values())
        hidden = len(errors) - len(errors[:rows])
        notes = [f"{hidden} rows with smaller errors"] if hidden else []
        if not errors:
            notes = ["no op returned a 16-bit result: was the code in an autocast block?"]
        below = [f"{layer}, {operand}: {found}" for (layer, operand), found in self.formats.ranges().items()]
        notes += below[:rows]
        if self.not_compared():
            notes.append(f"passed on as exact, not measured: {listed(self.not_compared())}")
        if jump := self.jump():
            key, before = jump
            notes.append(_told(key, before, self._errors[key].arriving))
            notes += [f"paste: {cure}" for cure in cures_of(*self.tracker.address(key[0]), (), "")]
        table.caption = "\n".join(notes) or None
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        rows = [
            {"module": module, "op": op, "pass": direction, "headroom": errors.headroom, **as_json(errors)}
            for (module, op, direction), errors in self.errors().items()
        ]
        below = self.formats.to_dict()
        return {"rows": as_json(rows), "not_compared": self.not_compared(), "formats": below}


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
        A context manager; read it with ``errors()``, ``table()`` and ``to_dict()``.

    Raises:
        ValueError: another dtype.

    Example:
        >>> with shadow_run() as run:
        ...     y = torch.tensor([1.0, 1e-9]).half()
        >>> [(op, errors.underflowed) for (_, op, _), errors in run.errors().items()]
        [('aten::_to_copy.default', 1)]
    """
    return ShadowRun(model, dtype=dtype)
