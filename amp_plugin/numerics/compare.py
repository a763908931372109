"""Two recorded runs: where they differ first by more than rounding explains.

for each result that both runs have:
    apart = difference between the runs of what it would be without rounding; so of each input
    allowed = 3 * apart of the inputs + 2 * eps of the coarsest dtype
    more than allowed: the programs differ here; so they do where one run alone has an op whose result differs
    the op's own error is beyond rounding in one run alone: its kernel differs
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_plugin.hardware import widest_float
from amp_plugin.numerics.finding import laid_out
from amp_plugin.numerics.op import Call, listed
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import Fingerprint, Storages, as_json, distance, fingerprint, norm

_FORMAT = "amp_plugin run 5"
_SUMS = 64 * 2.0**-23  # of the product of the two largest inputs: rounding of sums that cancel
_GROWTH = 3.0  # by which one op may enlarge differences that are there


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A result that two runs of a program do not share."""

    result: str  # which, in words
    op: str  # that made it
    module: str = ""  # path of the module; empty outside of modules
    line: str = ""  # of the program, that calls the op; empty if unknown
    relative: float  # the difference; of recorded runs that of what the results would be without rounding
    allowed: float  # how large it may be
    reason: str = ""  # what is known of it besides
    is_rounding: bool = False  # whether rounding explains it

    def __str__(self) -> str:
        explains = "explains it" if self.is_rounding else "does not explain it"
        difference = f"{self.relative:.2g}, relative; rounding {explains}: {self.allowed:.2g}"
        known = [("op", self.op), ("line", self.line), ("reason", self.reason), ("difference", difference)]
        return laid_out(self.result, [row for row in known if row[1]])


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One result of one op."""

    step: int  # optimizer steps before it
    direction: str  # "forward" or "backward"
    module: str  # path of the module; empty outside of modules
    op: str  # full name
    line: str  # the line that called it, or its forward op; empty if unknown
    dtype: str  # of the result
    shape: tuple[int, ...]  # of the result
    checksum: int  # of its bits
    held: Fingerprint  # of what it would be without rounding
    reads: tuple[Fingerprint, ...]  # of the inputs without rounding
    eps: float  # of the coarsest dtype among result and inputs
    excess: float  # the op's own error over what rounding its result once and sums in fp32 may come to
    taken: float  # rounding of the inputs, where the result is taken as exact; else 0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


class Run(NamedTuple):
    """A recorded run."""

    records: list[OpRecord]  # results in the order of the ops
    unmeasured: dict[str, int]  # ops that did not run in fp64 -> how often

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run; nothing else is unpickled, and another file is a ValueError."""
        kept, reason = None, None
        with torch.serialization.safe_globals([OpRecord, Fingerprint]):
            try:
                kept = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                reason = error
        if not isinstance(kept, tuple) or kept[0] != _FORMAT:
            msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save run.pt train.py"
            raise ValueError(msg) from reason
        return cls(*kept[1:])


class RunRecorder(WideRun):  # type: ignore[no-untyped-call]
    """Record what each op of a region makes, into a file for ``compare_runs``.

    A few hundred numbers of each tensor are kept: some 2 kB per op. Each op runs twice more in fp64, on its
    inputs and on what they would be without rounding; the program's own results and random numbers stay.
    Memory: the fp64 values of every living tensor. The file is written when the region ends.

    Args:
        path: of the file.
        model: gives the module names; default: whatever module is called.
        steps: optimizer steps to record; what comes later runs unrecorded.

    Attributes:
        run: what was recorded so far.

    Raises:
        ValueError: ``steps`` is below 1.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        if steps < 1:
            msg = f"record_run(steps={steps}): give at least 1"
            raise ValueError(msg)
        super().__init__(model, widest_float(torch.accelerator.current_accelerator() or torch.device("cpu")))
        self._path, self._most = Path(path), steps
        self._made: Storages[int] = Storages()  # numbers of the records that made them
        self.run = Run([], self.unseen)

    def ended(self, error: BaseException | None) -> None:
        """Write the file, after an error of the program too."""
        torch.save((_FORMAT, self.run.records, dict(self.run.unmeasured)), self._path)

    def to_dict(self) -> dict[str, Any]:
        """Return file, number of results and steps, as JSON's values."""
        steps = max((record.step + 1 for record in self.run.records), default=0)
        return {"file": str(self._path), "results": len(self.run.records), "steps": steps}

    def report(self) -> str:
        """Return the same as text."""
        return "{results} results of {steps} steps are in {file}".format(**self.to_dict())

    def before(self, call: Call) -> None:
        """Take the inputs' fingerprints."""
        if self.tracker.steps < self._most:
            super().before(call)
            call.keep_fingerprints(self._reads(call))

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if self.tracker.steps < self._most:
            super().after(call, output)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result."""
        if call.traits.is_unwritten or call.traits.is_collective or not self._is_read(result):
            return
        site, tensors = call.site, [argument.tensor for argument in call.arguments]
        dtypes = [tensor.dtype for tensor in (result, *tensors)]
        floats = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        coarsest = max(floats, key=lambda info: info.eps, default=None)
        self._made.set(result, len(self.run.records))
        record = OpRecord(
            step=self.tracker.steps,
            direction=call.direction,
            module=site.module,
            op=call.traits.name,
            line=str(site.place or ""),
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            checksum=fingerprint(result).checksum,
            held=fingerprint(self.shadows.of(result), len(self.run.records)),
            reads=call.read,
            eps=coarsest.eps if coarsest else 0.0,
            excess=_excess(call, result, exact, coarsest) if exact is not None and coarsest else 0.0,
            taken=max(map(self._rounding, tensors), default=0.0) if exact is None else 0.0,
        )
        self.run.records.append(record)

    def _reads(self, call: Call) -> Iterator[Fingerprint]:
        for tensor in (argument.tensor for argument in call.given):
            if self._is_read(tensor) and tensor.numel():
                made_by = self._made.get(tensor)
                yield fingerprint(self.shadows.of(tensor), -1 if made_by is None else made_by)

    def _is_read(self, tensor: Tensor) -> bool:
        is_room = tensor.dtype is torch.uint8  # for a backward pass
        return self.shadows.follows(tensor) and not is_room

    def _rounding(self, tensor: Tensor) -> float:
        is_known = self.shadows.follows(tensor) and tensor.is_floating_point()
        return distance(tensor, self.shadows.of(tensor)) if is_known else 0.0


def _excess(call: Call, result: Tensor, exact: Tensor, coarsest: torch.finfo) -> float:
    """Return an op's own error over what rounding its result, and sums in fp32 that cancel, may come to."""
    if not result.is_floating_point():
        return 0.0
    finite = exact.isfinite() & result.isfinite()
    given = [argument.tensor for argument in call.arguments]
    apart, size, *norms = map(norm, ((result - exact)[finite], exact[finite], *given))
    product = math.prod(sorted(max(size, 1.0) for size in norms)[-2:])
    tiny = coarsest.eps * coarsest.smallest_normal * math.sqrt(result.numel())
    allowed = 2 * coarsest.eps * size + _SUMS * product + tiny
    return apart / allowed if math.isfinite(allowed) else 0.0


record_run = RunRecorder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs compared.

    Attributes:
        compared: results both runs have.
        only_first, only_second: results that one of them has, such as casts.
        differing: how many of those compared differ in a bit.
        first: the first that differs; None if none does.
        unexplained: the first that rounding does not explain; None if none is.
        unseen: the difference of a result up to which rounding explains it, the median.
        unmeasured: ops that did not run in fp64 -> how often; what they made is taken as exact.
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None
    unseen: float
    unmeasured: dict[str, int]

    def report(self) -> str:
        """Return what is known, as text."""
        alone = f"; {self.only_first} are in the first run alone, {self.only_second} in the second alone"
        counts = f"{self.compared} results compared, {self.differing} differ"
        counts += alone if self.only_first or self.only_second else ""
        if self.first is None:
            return f"{counts}: what both runs have is equal, bit for bit"
        unexplained = f"first that rounding does not explain: {self.unexplained}"
        parts = [
            counts,
            f"first difference: {self.first}",
            unexplained if self.unexplained else "rounding explains every difference",
            f"not to be told from rounding: differences below {self.unseen:.1g} of a result",
            f"taken as exact, not measured: {listed(self.unmeasured)}" if self.unmeasured else "",
        ]
        return "\n\n".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return as_json(self)  # type: ignore[no-any-return]


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two files of ``record_run``.

    Results are matched by step, direction, module, op and how often that came before; so a run in bf16 may be
    compared with one in fp32, whose casts are missing. What is compared is each result without rounding: it
    may differ where the inputs do, and by twice the eps of the coarsest dtype.

    Args:
        first: a file.
        second: another.

    Raises:
        ValueError: a file does not hold a recorded run, or the two runs share no result.
    """
    ours, theirs = Run.load(Path(first)), Run.load(Path(second))
    keys, others = _by_place(ours.records), _by_place(theirs.records)
    shared = {number: others[key] for key, number in keys.items() if key in others}
    if not shared:
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    matched = (ours, shared.keys()), (theirs, set(shared.values()))
    alone = [
        {number: record for number, record in enumerate(run.records) if number not in numbers}
        for run, numbers in matched
    ]
    allowed, differing, largest = [], [], 0.0  # the last: difference that is explained, so far
    for number, other in shared.items():
        mine, its = ours.records[number], theirs.records[other]
        judged = _judged(mine, its, alone, largest)
        allowed.append(judged.allowed)
        if judged.is_rounding:
            largest = max(largest, judged.relative)
        if (mine.dtype, mine.checksum) != (its.dtype, its.checksum):
            differing.append(judged)
    return RunComparison(
        compared=len(shared),
        only_first=len(alone[0]),
        only_second=len(alone[1]),
        differing=len(differing),
        first=next(iter(differing), None),
        unexplained=next((found for found in differing if not found.is_rounding), None),
        unseen=median(allowed),
        unmeasured=dict(Counter(ours.unmeasured) | Counter(theirs.unmeasured)),
    )


def _judged(
    mine: OpRecord, its: OpRecord, alone: Sequence[Mapping[int, OpRecord]], largest: float
) -> Difference:
    """Compare a result, or the input of it that an op which one run alone has made too different."""
    slack, inputs, reason = 2 * max(mine.eps, its.eps), 0.0, ""
    relative = mine.held.difference(its.held)
    for read, other in zip(mine.reads, its.reads, strict=False):
        apart, allowed = read.difference(other), _GROWTH * largest + slack
        maker = alone[0].get(read.made_by) or alone[1].get(other.made_by)
        if maker is not None and apart > allowed:
            relative, reason = apart, f"an input comes from {maker}, which one run alone has"
            break
        inputs = max(inputs, apart)
    else:
        allowed = _GROWTH * (inputs + mine.taken + its.taken) + slack
        if inputs and mine.held.is_discrete:
            allowed += math.sqrt(4 / max(math.prod(mine.shape), 1))  # one element may always turn
        low, high = sorted((mine.excess, its.excess))
        if high > 1 >= low:
            reason = f"the op's own error is {high:.2g} times what rounding allows, in one run alone"
    return Difference(
        result=f"{mine}" + ("" if mine.dtype == its.dtype else f" against {its.dtype}"),
        op=mine.op,
        module=mine.module,
        line=mine.line,
        relative=relative,
        allowed=allowed,
        reason=reason,
        is_rounding=relative <= allowed and not reason,
    )


def _by_place(records: Sequence[OpRecord]) -> dict[tuple[object, ...], int]:
    counts: Counter[tuple[object, ...]] = Counter()
    placed: dict[tuple[object, ...], int] = {}
    for number, record in enumerate(records):
        place = (record.step, record.direction, record.module, record.op)
        placed[(*place, counts[place], record.shape)] = number
        counts[place] += 1
    return placed
