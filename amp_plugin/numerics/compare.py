"""Two recorded runs: where they differ first by more than rounding explains.

for each result that both runs have:
    apart = difference between the runs of what it would be without rounding; so of each input
    allowed = 3 * apart of the inputs + 2 * eps of the coarsest dtype
    more than allowed: the programs differ here; so they do where one run alone has an op whose result differs
    the op's own error is beyond rounding in one run alone: its kernel differs

Recordings of several ranks are compared rank by rank. The rank that differs at the earliest result comes
first: the others may only have received what it computed.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.hardware import widest_float
from amp_plugin.numerics.finding import laid_out
from amp_plugin.numerics.op import Call, listed
from amp_plugin.numerics.places import Site, is_called_by_engine
from amp_plugin.numerics.rank_files import RankFile, RecordedFiles
from amp_plugin.numerics.replicas import Weight, replicas_of, unlike_the_others
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import (
    Fingerprint,
    Storages,
    as_json,
    distance,
    fingerprint,
    norm,
    real_values,
)

_FORMAT = "amp_plugin run 6"
_FORMAT_OF_RESULTS_ALONE = "amp_plugin run 5"  # without weights and gradients
_SUMS = 64 * 2.0**-23  # of the product of the two largest inputs: rounding of sums that cancel
_MOST_REPLICAS = 5  # of the gradients that differ between ranks, in a report
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
    ranks: tuple[int, ...] = ()  # that have it; empty if one process was recorded

    def __str__(self) -> str:
        explains = "explains it" if self.is_rounding else "does not explain it"
        difference = f"{self.relative:.2g}, relative; rounding {explains}: {self.allowed:.2g}"
        ranks = "rank" if len(self.ranks) == 1 else "ranks", _listed_ranks(self.ranks)
        known = [
            ranks,
            ("op", self.op),
            ("line", self.line),
            ("reason", self.reason),
            ("difference", difference),
        ]
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
    """A recorded run of one process."""

    records: list[OpRecord]  # results in the order of the ops
    unmeasured: dict[str, int]  # ops that did not run in fp64 -> how often
    weights: dict[str, Weight]  # by name, before their first step
    gradients: dict[int, str]  # number of a record of a gradient -> name of its weight
    is_whole: bool = True  # whether the region ended, and not by an error

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a file; nothing else is unpickled, and another file is a ValueError."""
        kept, reason = None, None
        with torch.serialization.safe_globals([OpRecord, Fingerprint, Weight]):
            try:
                kept = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                reason = error
        match kept:
            case (found, *fields) if found == _FORMAT:
                return cls(*fields)
            case (found, records, unmeasured) if found == _FORMAT_OF_RESULTS_ALONE:
                return cls(records, unmeasured, {}, {})
        msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save run.amp train.py"
        raise ValueError(msg) from reason

    @property
    def steps(self) -> int:
        """How many optimizer steps it has begun."""
        return max((record.step + 1 for record in self.records), default=0)

    def gradient_records(self) -> dict[tuple[int, str, int], OpRecord]:
        """Return the records of gradients by step, weight, and how often that came before."""
        counts: Counter[tuple[int, str]] = Counter()
        found = {}
        for number, name in self.gradients.items():
            record = self.records[number]
            found[record.step, name, counts[record.step, name]] = record
            counts[record.step, name] += 1
        return found


class _Exchange(NamedTuple):
    """A collective whose result is recorded when an op reads it: before, it may still be on its way."""

    site: Site  # of the collective
    direction: str
    read: tuple[Fingerprint, ...]  # of what this rank sent
    taken: float  # rounding of what it sent, relative


class RunRecorder(WideRun):  # type: ignore[no-untyped-call]
    """Record what each op of a region makes, into a file for ``compare_runs``.

    If there are several ranks, each writes a file of its own. ``path`` is then a folder with ``rank-0.amp``,
    ``rank-1.amp`` and so on, and ``manifest.json``. Each rank writes its file after each step, too, so that a
    rank that is killed leaves the steps before.

    A few hundred numbers of each tensor are kept: some 2 kB per op. Each op runs twice more in fp64, on its
    inputs and on what they would be without rounding; the program's own results and random numbers stay.
    Memory: the fp64 values of every living tensor. The file is written when the region ends.

    Args:
        path: of the file, or of the folder if there are several ranks.
        model: gives the module names; default: whatever module is called.
        steps: optimizer steps to record; what comes later runs unrecorded.

    Attributes:
        run: what was recorded so far.

    Raises:
        ValueError: ``steps`` is below 1.
        FileExistsError: ``path`` is a folder, and this process is the only one; or it is a file, and there
            are several ranks.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        if steps < 1:
            msg = f"record_run(steps={steps}): give at least 1"
            raise ValueError(msg)
        super().__init__(model, widest_float(torch.accelerator.current_accelerator() or torch.device("cpu")))
        self._file, self._most = RankFile(Path(path)), steps
        self._made: Storages[int] = Storages()  # numbers of the records that made them
        self._exchanged: Storages[_Exchange] = Storages()  # results of collectives that no op has read yet
        # rounding of what ranks exchanged, relative: by storage, and by weight of what DDP puts into buckets
        self._taken: Storages[float] = Storages()
        self._taken_of_weights: dict[str, float] = {}
        self.run = Run([], self.unseen, {}, {})

    def open(self, _: ExitStack) -> None:
        """Find the file to write."""
        self._file.settle()

    def ended(self, error: BaseException | None) -> None:
        """Write the file, after an error of the program too."""
        self._file.settle()
        self._write(is_whole=error is None)

    def _write(self, *, is_whole: bool) -> None:
        kept = self.run._replace(unmeasured=dict(self.run.unmeasured), is_whole=is_whole)
        self._file.write(lambda path: torch.save((_FORMAT, *kept), path))

    def to_dict(self) -> dict[str, Any]:
        """Return file, number of results and steps, as JSON's values."""
        return {"file": str(self._file.path), "results": len(self.run.records), "steps": self.run.steps}

    def report(self) -> str:
        """Return the same as text."""
        return "{results} results of {steps} steps are in {file}".format(**self.to_dict())

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record the gradients as the optimizer finds them, and each weight before its first step."""
        if self.tracker.steps >= self._most:
            return
        with suppress(
            OSError
        ):  # a folder that cannot be made does not end the run; the end of the region says so
            self._file.settle()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for place, weight in enumerate(weights):
            self._file.note_mesh(_mesh_of(weight))
            name = self.tracker.weight(weight) or f"parameter {place} of {type(optimizer).__name__}"
            self._record_weight(weight, name)
            self._record_gradient(weight.grad, name)

    def _record_weight(self, weight: Tensor, name: str) -> None:
        values = real_values(_local(weight))
        if name not in self.run.weights and values is not None and values.numel():
            is_constant = bool((values == values.flatten()[0]).all())
            self.run.weights[name] = Weight(fingerprint(values).checksum, is_constant)

    def _record_gradient(self, gradient: Tensor | None, name: str) -> None:
        local = None if gradient is None else _local(gradient)
        if local is None or not self._is_read(local) or not local.numel():
            return
        self._arrives(local, name)
        module, _, own_name = name.rpartition(".")
        exchanged = self._taken.get(
            local
        )  # by a collective, so that all rounding before it is in the numbers
        taken = 0.0 if exchanged is None else max(exchanged, self._taken_of_weights.get(name, 0.0))
        self.run.gradients[len(self.run.records)] = name
        site = Site(f"gradient of {own_name}", module, None, None, in_block=False)
        self._add(site, "backward", local, _coarsest([local]), taken=taken)

    def step_ended(self, _: Optimizer) -> None:
        """Write what is there, if this rank may be killed because another one ends."""
        self._taken = Storages()
        self._taken_of_weights = {}
        if self._file.has_other_ranks and self.tracker.steps < self._most:
            with suppress(OSError):  # a disk that is full does not end the run; the end of the region says so
                self._write(is_whole=False)

    def before(self, call: Call) -> None:
        """Take the inputs' fingerprints."""
        if self.tracker.steps >= self._most:
            return
        super().before(call)
        if not call.traits.is_collective:
            for argument in call.given:
                self._arrives(argument.tensor)
        if not call.traits.waits:  # what it waits for may be on its way
            call.keep_fingerprints(self._reads(call))
        if call.traits.is_collective:
            call.keep(self._rounding_of_inputs(call))

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if self.tracker.steps < self._most:
            super().after(call, output)

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Note a collective, whose results are recorded when an op reads them."""
        super().exchanged(call, results)
        if call.traits.waits:
            return
        for result in results:
            self._taken.set(result, call.kept)
            # The gradients in a bucket are recorded one by one, before the step.
            if not self._is_of_bucket(call):
                site = replace(call.site, op=call.traits.name)
                self._exchanged.set(result, _Exchange(site, call.direction, call.read, call.kept))

    @staticmethod
    def _is_of_bucket(call: Call) -> bool:
        """Whether DDP calls the op in C++, to fill its buckets of gradients or to empty them."""
        return (call.leaf is not None or not call.is_backward) and is_called_by_engine()

    def _arrives(self, tensor: Tensor, weight: str = "") -> None:
        """Record what a collective brought, when it is first read; of a gradient, ``weight`` is the name."""
        if (exchange := self._exchanged.get(tensor)) is None:
            return
        self._exchanged.discard(tensor)
        if self._is_read(tensor) and tensor.numel():
            self._made.set(tensor, len(self.run.records))
            site = replace(exchange.site, module=weight or exchange.site.module)
            coarsest, taken = _coarsest([tensor]), exchange.taken
            self._add(site, exchange.direction, tensor, coarsest, reads=exchange.read, taken=taken)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result."""
        if call.traits.is_unwritten or not self._is_read(result):
            return
        site, tensors = replace(call.site, op=call.traits.name), [given.tensor for given in call.arguments]
        if self._is_of_bucket(call):
            if (
                call.leaf is None
            ):  # the order in which DDP empties a bucket depends on the other weights in it
                self._taken.set(
                    result, max((self._taken.get(tensor) or 0.0 for tensor in tensors), default=0.0)
                )
                return
            site = replace(site, module=self.tracker.weight(call.leaf) or site.module)
            self._taken_of_weights[site.module] = self._rounding(result)
        coarsest = _coarsest([result, *tensors])
        self._made.set(result, len(self.run.records))
        self._add(
            site,
            call.direction,
            result,
            coarsest,
            reads=call.read,
            excess=_excess(call, result, exact, coarsest) if exact is not None and coarsest else 0.0,
            taken=self._rounding_of_inputs(call) if exact is None else 0.0,
        )

    def _add(
        self,
        site: Site,
        direction: str,
        result: Tensor,
        coarsest: torch.finfo | None,
        *,
        reads: tuple[Fingerprint, ...] = (),
        excess: float = 0.0,
        taken: float = 0.0,
    ) -> None:
        record = OpRecord(
            step=self.tracker.steps,
            direction=direction,
            module=site.module,
            op=site.op,
            line=str(site.place or ""),
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            checksum=fingerprint(result).checksum,
            held=fingerprint(self.shadows.of(result), len(self.run.records)),
            reads=reads,
            eps=coarsest.eps if coarsest else 0.0,
            excess=excess,
            taken=taken,
        )
        self.run.records.append(record)

    def _rounding_of_inputs(self, call: Call) -> float:
        return max((self._rounding(argument.tensor) for argument in call.arguments), default=0.0)

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


def _coarsest(tensors: Sequence[Tensor]) -> torch.finfo | None:
    """Return what is known of the dtype with the largest eps; None if all tensors are discrete."""
    dtypes = [tensor.dtype for tensor in tensors]
    floats = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(floats, key=lambda info: info.eps, default=None)


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: of a DTensor its shard, else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _mesh_of(tensor: Tensor) -> dict[str, int]:
    """Return the dimensions of a DTensor's device mesh by name; empty for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))


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
class AbsentRanks:
    """Ranks of which a recording holds not everything.

    Attributes:
        missing: have no file.
        stopped: ended by an error, or were killed; the steps before are there.
    """

    missing: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()

    def told(self, run: str) -> Iterator[str]:
        """Yield what is known of a run, in sentences."""
        for ranks, what in (
            (self.missing, "missing: no file"),
            (self.stopped, "cut off: the region did not end"),
        ):
            if ranks:
                yield f"{_named(ranks)} of the {run} run {'is' if len(ranks) == 1 else 'are'} {what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Two runs compared, all ranks together.

    Attributes:
        compared: results both runs have.
        only_first, only_second: results that one of them has, such as casts.
        differing: how many of those compared differ in a bit.
        first: the first that differs, on the rank where it comes earliest; None if none does.
        unexplained: the first that rounding does not explain; None if none is.
        unseen: the difference of a result up to which rounding explains it, the median.
        unmeasured: ops that did not run in fp64 -> how often; what they made is taken as exact.
        ranks: that both recordings have; empty if each is the file of one process.
        absent_first, absent_second: ranks that are missing in a recording, or were cut off.
        replicas_first, replicas_second: gradients that differ between the ranks of a recording though their
            weights began with the same bits; of the first step that has any.
    """

    compared: int
    only_first: int
    only_second: int
    differing: int
    first: Difference | None
    unexplained: Difference | None
    unseen: float
    unmeasured: dict[str, int]
    ranks: tuple[int, ...] = ()
    absent_first: AbsentRanks = AbsentRanks()
    absent_second: AbsentRanks = AbsentRanks()
    replicas_first: tuple[Difference, ...] = ()
    replicas_second: tuple[Difference, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether rounding explains every difference, replicas agree, and no rank is missing or cut off."""
        absent = self.absent_first, self.absent_second
        is_complete = not any(ranks.missing or ranks.stopped for ranks in absent)
        return is_complete and not (self.unexplained or self.replicas_first or self.replicas_second)

    def report(self) -> str:
        """Return what is known, as text."""
        alone = f"; {self.only_first} are in the first run alone, {self.only_second} in the second alone"
        counts = f"{self.compared} results compared"
        counts += f" on {_named(self.ranks)}" if self.ranks else ""
        counts += f", {self.differing} differ"
        counts += alone if self.only_first or self.only_second else ""
        counts += ": what both runs have is equal, bit for bit" if self.first is None else ""
        return "\n\n".join(filter(None, [counts, *self._about_ranks(), *self._about_differences()]))

    def _about_ranks(self) -> Iterator[str]:
        yield from self.absent_first.told("first")
        yield from self.absent_second.told("second")
        for run, replicas in (("first", self.replicas_first), ("second", self.replicas_second)):
            for difference in replicas[:_MOST_REPLICAS]:
                yield f"ranks of the {run} run differ where they must agree: {difference}"
            if hidden := len(replicas) - _MOST_REPLICAS:
                yield f"and {hidden} gradients more" if hidden > 0 else ""

    def _about_differences(self) -> Iterator[str]:
        if self.first is None:
            return
        yield f"first difference: {self.first}"
        unexplained = f"first that rounding does not explain: {self.unexplained}"
        yield unexplained if self.unexplained else "rounding explains every difference"
        yield f"not to be told from rounding: differences below {self.unseen:.1g} of a result"
        yield f"taken as exact, not measured: {listed(self.unmeasured)}" if self.unmeasured else ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return as_json(self)  # type: ignore[no-any-return]


class _Compared(NamedTuple):
    """Two files compared."""

    allowed: list[float]  # for each result that both have
    only_first: int
    only_second: int
    differing: list[tuple[int, Difference]]  # with the number of the result in the first file


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two recordings of ``record_run``: files, or the folders of several ranks.

    Results are matched by rank, step, direction, module, op and how often that came before; so a run in bf16
    may be compared with one in fp32, whose casts are missing. What is compared is each result without
    rounding: it may differ where the inputs do, and by twice the eps of the coarsest dtype.

    Args:
        first: a recording.
        second: another, of as many ranks. It may be the same: then only its replicas are compared.

    Raises:
        ValueError: a file does not hold a recorded run, or the two runs share no rank or no result, or the
            numbers of ranks differ.
    """
    ours, theirs = RecordedFiles.find(Path(first)), RecordedFiles.find(Path(second))
    if ours.ranks != theirs.ranks:
        counts = f"{first} has {ours.ranks} ranks, and {second} has {theirs.ranks}"
        msg = f"{counts}; record both with as many processes"
        raise ValueError(msg)
    runs, others = _loaded(ours), _loaded(theirs)
    ranks = tuple(sorted(runs.keys() & others.keys()))
    compared = {rank: _compared(runs[rank], others[rank]) for rank in ranks}
    if not any(result.allowed for result in compared.values()):
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    differing = {rank: result.differing for rank, result in compared.items()}
    unexplained = {
        rank: [found for found in all_found if not found[1].is_rounding]
        for rank, all_found in differing.items()
    }
    has_ranks = ours.ranks > 1
    unmeasured = [Counter(run.unmeasured) for run in (*runs.values(), *others.values())]
    return RunComparison(
        compared=sum(len(result.allowed) for result in compared.values()),
        only_first=sum(result.only_first for result in compared.values()),
        only_second=sum(result.only_second for result in compared.values()),
        differing=sum(map(len, differing.values())),
        first=_earliest(differing, has_ranks=has_ranks),
        unexplained=_earliest(unexplained, has_ranks=has_ranks),
        unseen=median(allowed for result in compared.values() for allowed in result.allowed),
        unmeasured=dict(reduce(or_, unmeasured, Counter())),
        ranks=ranks if has_ranks else (),
        absent_first=_absent(ours, runs) if has_ranks else AbsentRanks(),
        absent_second=_absent(theirs, others) if has_ranks else AbsentRanks(),
        replicas_first=_unlike_replicas(runs),
        replicas_second=_unlike_replicas(others),
    )


def _loaded(files: RecordedFiles) -> dict[int, Run]:
    return {rank: Run.load(path) for rank, path in files.present.items()}


def _absent(files: RecordedFiles, runs: Mapping[int, Run]) -> AbsentRanks:
    stopped = tuple(rank for rank, run in runs.items() if not run.is_whole)
    return AbsentRanks(missing=files.missing, stopped=stopped)


def _earliest(found: Mapping[int, Sequence[tuple[int, Difference]]], *, has_ranks: bool) -> Difference | None:
    """Return the difference that comes first in the program, with the ranks that have it there."""
    firsts = {rank: differences[0] for rank, differences in found.items() if differences}
    if not firsts:
        return None
    number, difference = min(firsts.values(), key=lambda entry: entry[0])
    ranks = tuple(rank for rank, (other, _) in firsts.items() if other == number)
    return replace(difference, ranks=ranks) if has_ranks else difference


def _unlike_replicas(runs: Mapping[int, Run]) -> tuple[Difference, ...]:
    """Return the gradients that differ between ranks and must not, of the first step that has any."""
    replicas = replicas_of([run.weights for run in runs.values()])
    gradients = {rank: run.gradient_records() for rank, run in runs.items()}
    shared = set.intersection(*map(set, gradients.values())) if len(runs) > 1 else set()
    differing: dict[tuple[int, int], list[Difference]] = {}
    for place in sorted(shared):
        step, name, count = place
        found = (
            _unlike({rank: records[place] for rank, records in gradients.items()})
            if name in replicas
            else None
        )
        if found is not None:
            differing.setdefault((step, count), []).append(found)
    return tuple(differing[min(differing)]) if differing else ()


def _unlike(records: Mapping[int, OpRecord]) -> Difference | None:
    """Compare the gradients of one weight on all ranks; return None if rounding explains the differences."""
    ranks = unlike_the_others({rank: record.checksum for rank, record in records.items()})
    if not ranks:
        return None
    own = records[ranks[0]]
    relative = max(own.held.difference(record.held) for record in records.values())
    allowed = 2 * max(record.eps for record in records.values())
    if relative <= allowed:
        return None
    return Difference(
        result=f"{own}",
        op=own.op,
        module=own.module,
        relative=relative,
        allowed=allowed,
        reason="all ranks began with the same weight; an all-reduce of its gradient may be missing",
        ranks=ranks,
    )


def _compared(ours: Run, theirs: Run) -> _Compared:
    keys, others = _by_place(ours.records), _by_place(theirs.records)
    shared = {number: others[key] for key, number in keys.items() if key in others}
    matched = (ours, shared.keys()), (theirs, set(shared.values()))
    alone = [
        {number: record for number, record in enumerate(run.records) if number not in numbers}
        for run, numbers in matched
    ]
    allowed, differing, largest = [], [], 0.0  # the last: difference that is explained, so far
    for number, other in shared.items():
        mine, its = ours.records[number], theirs.records[other]
        # A gradient may be the sum of several results, and differ as much as any of them.
        known = largest if number in ours.gradients else 0.0
        judged = _judged(mine, its, alone, largest, known)
        allowed.append(judged.allowed)
        if judged.is_rounding:
            largest = max(largest, judged.relative)
        if (mine.dtype, mine.checksum) != (its.dtype, its.checksum):
            differing.append((number, judged))
    return _Compared(allowed, len(alone[0]), len(alone[1]), differing)


def _judged(
    mine: OpRecord, its: OpRecord, alone: Sequence[Mapping[int, OpRecord]], largest: float, inputs: float
) -> Difference:
    """Compare a result, or the input of it that an op which one run alone has made too different.

    ``largest`` is the largest difference so far that is explained. ``inputs`` is the difference of the inputs
    as far as it is known without their fingerprints.
    """
    slack, reason = 2 * max(mine.eps, its.eps), ""
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


def _listed_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed_ranks(ranks)}"
