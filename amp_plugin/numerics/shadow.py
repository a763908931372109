"""Find the ops that lose precision: run each op of a program in fp32 or fp64 too, and compare the results."""

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

# An arriving error stands out if it is above the first number, and above all earlier ones by the second.
_JUMP_TO, _JUMP_BY = 0.05, 10.0


@dataclass(kw_only=True, slots=True)
class Errors:
    """The errors of one op in one module. The errors of the worst call are given.

    Attributes:
        calls: The number of calls that were compared.
        own: The error that the op itself adds: the mean of |result - exact| / |exact| over the elements,
            where ``exact`` is the result of the op in the wide dtype on the same inputs. A single rounding
            gives a quarter of the dtype's eps. An element that underflows counts 1.
        arriving: The error of all ops so far: norm(result - other) / norm(other), where ``other`` is the
            result of the op in a run without rounding.
        largest: The largest magnitude of a finite result.
        narrow: The dtype of the results. If there are several, the one with the smallest range.
        elements: The number of elements in all results.
        underflowed: The number of elements that are 0 although the exact ones are not.
    """

    calls: int = 0
    own: float = 0.0
    arriving: float = 0.0
    largest: float = 0.0
    narrow: torch.dtype = torch.float32
    elements: int = 0
    underflowed: int = 0

    def add(self, result: Tensor, exact: Tensor, arriving: Tensor) -> None:
        """Add one call.

        Args:
            result: The result of the program.
            exact: The result of the op in the wide dtype on the same inputs.
            arriving: The result of the op in the run without rounding.
        """
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
        """The op's own error in units of its dtype's eps. 0.25 is a single rounding; 1 or more is worse."""
        return self.own / torch.finfo(self.narrow).eps

    @property
    def headroom(self) -> float:
        """The number of powers of two between the largest result and the largest number of its dtype."""
        return math.log2(torch.finfo(self.narrow).max / self.largest) if self.largest else math.inf

    def cells(self) -> dict[str, str]:
        """Return the texts of a table row, by column."""
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
    """Return a sentence on an op after which the arriving error is much larger, and what to do."""
    where = f" in {key[0]}" if key[0] else ""
    cause = (
        "its inputs do not have enough digits; compute them in fp32"
        if math.isfinite(after)
        else "its result is not finite in 16 bits; compute it in fp32"
    )
    return f"the arriving error jumps from {before:.1e} to {after:.1e} at {key[1]}{where}: {cause}"


def _mean_relative_error(values: Tensor, exact: Tensor) -> float:
    """Return the mean of |values - exact| / |exact| over the elements at which ``exact`` is finite.

    An element counts 1 at most.
    """
    finite = exact.isfinite()
    values, exact = in_widest_float(values[finite]), in_widest_float(exact[finite])
    difference = (values - exact).abs()
    relative = torch.where(difference == 0, 0.0, difference / exact.abs()).nan_to_num(nan=1.0)
    return float(relative.clamp(max=1.0).mean()) if relative.numel() else 0.0


class WideRun(Region):  # type: ignore[no-untyped-call]
    """A region that runs each op twice more in a wide dtype.

    One run gets the program's own inputs. The other run gets the inputs that a program without rounding would
    have (the shadows).
    """

    def __init__(self, model: nn.Module | None, dtype: torch.dtype) -> None:
        self.shadows = ShadowValues(dtype)  # the values that tensors would have without rounding
        tracker = Tracker(model)
        self.formats = FormatLog(tracker)  # measures layers in formats below 16 bits
        super().__init__(tracker, self.formats, self)

    def before(self, call: Call) -> None:
        """Prepare the arguments of both wide runs: the program's own values, and the shadows."""
        if call.traits.is_view or not call.is_repeatable:
            return
        # Arguments that the op writes to are copied, because shadows are updated from the results.
        shadows, copy = self.shadows, bool(call.traits.written)

        def arriving(tensor: Tensor) -> Tensor:
            wide = shadows.of(tensor) if shadows.follows(tensor) else tensor
            return wide.clone() if copy else wide

        exact = partial(shadows.plain, copy=copy)
        call.keep([call.changed(change, shadows.dtype) for change in (exact, arriving)])

    def after(self, call: Call, output: Any) -> None:
        """Run the op twice in the wide dtype, compare, and write the shadows of the results."""
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
        if others is None:  # the op cannot run in the wide dtype, so its result is taken as exact
            own, others = None, results
        for number, result in enumerate(results):
            if self.shadows.follows(result):
                self.shadows.of(result).copy_(others[number])
                if result.numel():
                    self.take(call, result, None if own is None else own[number])

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Forget the shadows of a collective's results, which may not have arrived from other ranks yet.

        When an op reads a result, it gets a new shadow that starts with its own values.
        """
        if any(map(self.shadows.follows, results)) and not call.traits.waits:
            call.count_unmeasured()
        for result in results:
            self.shadows.discard(result)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Handle one result that has a shadow.

        Args:
            call: The call of the op.
            result: The result of the program.
            exact: The result in the wide dtype on the same inputs. None if the op did not run in it.
        """


class ShadowRun(WideRun):  # type: ignore[no-untyped-call]
    """A region whose ops run in a wide dtype too. See ``shadow_run``."""

    def __init__(self, model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in {torch.float32, torch.float64}:
            msg = f"shadow_run(dtype={dtype}): give torch.float32, or torch.float64 for a program in fp32"
            raise ValueError(msg)
        self._errors: dict[Key, Errors] = {}
        super().__init__(model, dtype)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record the errors of a 16-bit result."""
        if exact is not None and is_low_precision(result.dtype):
            key = (call.site.module, call.traits.name, call.direction)
            self._errors.setdefault(key, Errors()).add(result, exact, self.shadows.of(result))

    def errors(self) -> dict[Key, Errors]:
        """Return the errors of each (module, op, direction), the largest own error first."""
        return dict(sorted(self._errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def jump(self) -> tuple[Key, float] | None:
        """Return the forward op at which the arriving error grows most, or None if no op stands out.

        The ops are compared in the order in which they first ran: each with the largest error before it.

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

    def told_jump(self) -> list[str]:
        """Return a sentence on the op of :meth:`jump`, and lines to paste. Empty if no op stands out."""
        if (jump := self.jump()) is None:
            return []
        key, before = jump
        cures = cures_of(*self.tracker.address(key[0]), (), "")
        return [_told(key, before, self._errors[key].arriving), *(f"paste: {cure}" for cure in cures)]

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that a tensor would have without rounding, as a copy in the wide dtype.

        Args:
            tensor: A dense floating-point tensor. If no op of the region made it, its own values are copied.
        """
        with unwatched():
            return self.shadows.of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often each op could not run in the wide dtype, so that its results count as exact."""
        return dict(self.unseen)

    def table(self, rows: int | None = 20) -> Table:
        """Return a rich table of the errors, the largest own error first.

        Args:
            rows: The number of rows. None shows all.
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
            notes.append(f"not measured, and taken as exact: {listed(self.not_compared())}")
        notes += self.told_jump()
        table.caption = "\n".join(notes) or None
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold."""
        rows = [
            {"module": module, "op": op, "pass": direction, "headroom": errors.headroom, **as_json(errors)}
            for (module, op, direction), errors in self.errors().items()
        ]
        below = self.formats.to_dict()
        return {"rows": as_json(rows), "not_compared": self.not_compared(), "formats": below}


def shadow_run(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> ShadowRun:
    """Run each op of a region in a wide dtype too, and measure how much precision 16 bits lose.

    Each op runs three times:

    1. as usual, for the program, whose results do not change;
    2. in the wide dtype on the same inputs, which gives the error that the op itself adds;
    3. in the wide dtype on the inputs of a run without rounding, which gives the error that has arrived.

    Ops that return 16 bits are listed. The region needs memory for the wide values of every live tensor.

    Some ops cannot be measured: random ops, collectives, and ops without a kernel for the wide dtype. Their
    results count as exact, and ``not_compared()`` counts them. For a DTensor each rank measures its shard.

    Args:
        model: The model, which gives the module names. By default names begin with the class of the outermost
            module that is called.
        dtype: The wide dtype, ``torch.float32`` or ``torch.float64``.

    Returns:
        A context manager. Read it with ``errors()``, ``table()`` and ``to_dict()``.

    Raises:
        ValueError: The dtype is another one.

    Example:
        >>> with shadow_run() as run:
        ...     y = torch.tensor([1.0, 1e-9]).half()
        >>> [(op, errors.underflowed) for (_, op, _), errors in run.errors().items()]
        [('aten::_to_copy.default', 1)]
    """
    return ShadowRun(model, dtype=dtype)
