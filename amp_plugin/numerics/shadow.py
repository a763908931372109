"""Run each op of a program a second time in fp32 or fp64, to find the ops that lose precision."""

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

# An op stands out if its accumulated error is above two limits. The first limit is _JUMP_TO.
# The second limit is _JUMP_BY times the largest accumulated error among all earlier ops.
_JUMP_TO, _JUMP_BY = 0.05, 10.0


@dataclass(kw_only=True, slots=True)
class Errors:
    """The errors of one op in one module. Each error is the maximum over all calls to the op.

    Attributes:
        calls: The number of calls that were compared.
        own: The error that the op itself adds. ``own`` is the mean of |result - exact| / |exact| over the
            elements, where ``exact`` is the result of the op in the wide dtype on the same inputs. If the op
            only rounds its result once, ``own`` is about a quarter of the dtype's eps. An element that
            underflows counts as an error of 1.
        arriving: The accumulated error of this op and all ops before it. ``arriving`` is norm(result - exact)
            / norm(exact), where ``exact`` is the result of the op in a run without rounding.
        largest: The largest magnitude among the finite elements of the results.
        narrow: The dtype of the results. If the results have several dtypes, ``narrow`` is the dtype with the
            smallest range.
        elements: The number of elements in all results.
        underflowed: The number of elements that are 0, although the exact result is not 0.
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
            exact: The result that the op gives in the wide dtype on the same inputs.
            arriving: The result that the op gives in a run without rounding.
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
        """The op's own error in units of its dtype's eps.

        A single rounding gives about 0.25. An error of 1 or more means that the op itself loses digits.
        """
        return self.own / torch.finfo(self.narrow).eps

    @property
    def headroom(self) -> float:
        """The number of powers of two between the largest result and the largest number of its dtype."""
        return math.log2(torch.finfo(self.narrow).max / self.largest) if self.largest else math.inf

    def cells(self) -> dict[str, str]:
        """Map the title of each table column to the text of this row's cell."""
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
    """Return a sentence that names an op at which the accumulated error jumps, and says what to do."""
    where = f" in {key[0]}" if key[0] else ""
    cause = (
        "its inputs do not have enough digits; compute them in fp32"
        if math.isfinite(after)
        else "its result is not finite in 16 bits; compute it in fp32"
    )
    return f"the accumulated error jumps from {before:.1e} to {after:.1e} at {key[1]}{where}: {cause}"


def _mean_relative_error(values: Tensor, exact: Tensor) -> float:
    """Return the mean of |values - exact| / |exact| over the elements of ``exact`` that are finite.

    Each element counts at most 1.
    """
    finite = exact.isfinite()
    values, exact = in_widest_float(values[finite]), in_widest_float(exact[finite])
    difference = (values - exact).abs()
    relative = torch.where(difference == 0, 0.0, difference / exact.abs()).nan_to_num(nan=1.0)
    return float(relative.clamp(max=1.0).mean()) if relative.numel() else 0.0


class WideRun(Region):  # type: ignore[no-untyped-call]
    """A region that runs each op two more times in a wide dtype such as fp64.

    The first additional run of an op uses the program's own inputs. The second additional run uses the values
    that the inputs would have without rounding. The values that a tensor would have without rounding are
    called its shadow.
    """

    def __init__(self, model: nn.Module | None, dtype: torch.dtype) -> None:
        self.shadows = ShadowValues(dtype)  # the values that tensors would have without rounding
        tracker = Tracker(model)
        self.formats = FormatLog(tracker)  # measures the layers that compute in formats below 16 bits
        super().__init__(tracker, self.formats, self)

    def before(self, call: Call) -> None:
        """Prepare the arguments of both runs in the wide dtype, from the inputs and their shadows."""
        if call.traits.is_view or not call.is_repeatable:
            return
        # If the op writes to its arguments, the extra runs get copies. The stored wide values do not change.
        shadows, copy = self.shadows, bool(call.traits.written)

        def arriving(tensor: Tensor) -> Tensor:
            wide = shadows.of(tensor) if shadows.follows(tensor) else tensor
            return wide.clone() if copy else wide

        exact = partial(shadows.plain, copy=copy)
        call.keep([call.changed(change, shadows.dtype) for change in (exact, arriving)])

    def after(self, call: Call, output: Any) -> None:
        """Run the op twice in the wide dtype, compare the results, and update the shadows."""
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
        if others is None:  # if an op cannot run in the wide dtype, its result is taken as exact
            own, others = None, results
        for number, result in enumerate(results):
            if self.shadows.follows(result):
                self.shadows.of(result).copy_(others[number])
                if result.numel():
                    self.take(call, result, None if own is None else own[number])

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Drop the shadows of a collective's results, because the data may not have arrived yet.

        When a later op reads a collective's result, that input gets a new shadow, which is a copy of the
        input's own values.
        """
        if any(map(self.shadows.follows, results)) and not call.traits.waits:
            call.count_unmeasured()
        for result in results:
            self.shadows.discard(result)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Handle one result that has a shadow.

        Args:
            call: The call to the op.
            result: The result of the program.
            exact: The result in the wide dtype on the same inputs. None if the op cannot run in the wide
                dtype.
        """


class ShadowRun(WideRun):  # type: ignore[no-untyped-call]
    """A region whose ops also run in a wide dtype. See ``shadow_run``."""

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
        """Map each (module, op, direction) to its errors, sorted by the op's own error, largest first."""
        return dict(sorted(self._errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def jump(self) -> tuple[Key, float] | None:
        """Return the forward op at which the accumulated error grows the most, or None if no op stands out.

        The ops are looked at in the order in which they first ran. The accumulated error of each op is
        compared with the largest accumulated error of all earlier ops.

        Returns:
            The key of the op in :meth:`errors`, and the largest accumulated error of the ops before it.
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
        """Return a sentence about the op at which the accumulated error jumps, and lines of code to paste.

        The list is empty if no op stands out.
        """
        if (jump := self.jump()) is None:
            return []
        key, before = jump
        cures = cures_of(*self.tracker.address(key[0]), (), "")
        return [_told(key, before, self._errors[key].arriving), *(f"paste: {cure}" for cure in cures)]

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that a tensor would have without rounding, as a copy in the wide dtype.

        Args:
            tensor: A dense floating-point tensor. If no op in the region computed the tensor, its own values
                are returned.
        """
        with unwatched():
            return self.shadows.of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often each op could not run in the wide dtype. Its results were taken as exact."""
        return dict(self.unseen)

    def table(self, rows: int | None = 20) -> Table:
        """Return a ``rich`` table of the errors, sorted by the op's own error, largest first.

        Args:
            rows: The largest number of rows. None shows all rows.
        """
        errors = list(self.errors().items())
        table = Table("module", "op", "pass", title="Errors", box=None, pad_edge=False)
        for column in Errors(elements=1).cells():
            table.add_column(column, justify="right", no_wrap=True)
        for (module, op, direction), found in errors[:rows]:
            name = op.removeprefix("aten::").removesuffix(".default")
            table.add_row(module or "(no module)", name, direction, *found.cells().values())
        hidden = len(errors) - len(errors[:rows])
        notes = [f"{hidden} more rows with smaller errors"] if hidden else []
        if not errors:
            notes = ["no op returned a 16-bit result: was the code in an autocast block?"]
        below = [f"{layer}, {operand}: {found}" for (layer, operand), found in self.formats.ranges().items()]
        notes += below[:rows]
        if self.not_compared():
            notes.append(f"not measured, so their results count as exact: {listed(self.not_compared())}")
        notes += self.told_jump()
        table.caption = "\n".join(notes) or None
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return all errors as JSON-serializable values."""
        rows = [
            {"module": module, "op": op, "pass": direction, "headroom": errors.headroom, **as_json(errors)}
            for (module, op, direction), errors in self.errors().items()
        ]
        below = self.formats.to_dict()
        return {"rows": as_json(rows), "not_compared": self.not_compared(), "formats": below}


def shadow_run(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> ShadowRun:
    """Run each op of a region in a wide dtype as well, and measure how much precision is lost in 16 bits.

    Each op runs three times:

    1. The first run is the program's own, and its results do not change.
    2. The second run uses the wide dtype and the same inputs. The second run shows the error that
       the op itself adds.
    3. The third run uses the wide dtype and inputs that were never rounded. The third run shows the
       accumulated error.

    Only ops with 16-bit results are listed. The region needs memory for the wide values of every live tensor.

    Random ops, collectives, and ops without a kernel for the wide dtype cannot be measured. The results of
    these ops count as exact, and ``not_compared()`` returns how often each op was called. For a DTensor, each
    rank measures its own shard.

    Args:
        model: The model from which module names are taken. By default, names begin with the class of the
            outermost module that is called.
        dtype: The wide dtype, ``torch.float32`` or ``torch.float64``.

    Returns:
        A context manager whose methods ``errors()``, ``table()`` and ``to_dict()`` return the measurements.

    Raises:
        ValueError: ``dtype`` is neither ``torch.float32`` nor ``torch.float64``.

    Example:
        >>> with shadow_run() as run:
        ...     y = torch.tensor([1.0, 1e-9]).half()
        >>> [(op, errors.underflowed) for (_, op, _), errors in run.errors().items()]
        [('aten::_to_copy.default', 1)]
    """
    return ShadowRun(model, dtype=dtype)
