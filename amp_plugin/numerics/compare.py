"""Compare two recorded runs, and find the first result that differs by more than rounding can explain.

for each result that both runs have:

    difference = the relative difference between the two results, both computed without rounding

    allowed = 3 * the largest difference between the inputs in the two runs + 2 * eps of the coarsest dtype

    if the difference is more than allowed, the programs differ at this op

    if an input that differs comes from an op that only one run has, the programs differ at that op

    if rounding explains the op's own error in only one of the two runs, the runs use different kernels

Recordings of several ranks are compared rank by rank. The report names the rank whose results differ first,
because the other ranks may only have received wrong results from this rank. compare_layouts.py compares a
single-process run with a run on several ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from typing import Any

from amp_plugin.numerics.compare_layouts import compare_layouts
from amp_plugin.numerics.dropout_on_ranks import wrong_dropouts
from amp_plugin.numerics.module_names import check_names, name_in_first
from amp_plugin.numerics.op import listed
from amp_plugin.numerics.rank_files import missing_ranks, recorded_files
from amp_plugin.numerics.recorded import Compared, Difference, OpRecord, Run, named_ranks
from amp_plugin.numerics.replicas import replicas_of, unlike_the_others
from amp_plugin.numerics.run_recorder import RunRecorder, record_run
from amp_plugin.numerics.values import as_json

__all__ = ["RunComparison", "RunRecorder", "compare_runs", "record_run"]

_MOST_REPLICAS = 5  # a report lists at most this many gradients that differ between ranks
_GROWTH = 3.0  # an op may multiply the difference between the two runs by up to this factor


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentRanks:
    """The ranks whose recording is missing or incomplete.

    Attributes:
        missing: Ranks that wrote no file.
        stopped: Ranks that ended with an error or were killed. Their earlier steps are recorded.
    """

    missing: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()

    def told(self, run: str) -> Iterator[str]:
        """Yield a sentence about the ranks of a run that wrote no file, and one about cut-off recordings."""
        for ranks, what in (
            (self.missing, "missing (no file was written)"),
            (self.stopped, "cut off (the program was killed or raised an error while it was recorded)"),
        ):
            if ranks:
                yield f"{named_ranks(ranks)} of {run} {'is' if len(ranks) == 1 else 'are'} {what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """The result of comparing two recorded runs, for all their ranks together.

    Attributes:
        compared: The number of op results that both runs have.
        only_first, only_second: The number of op results that only one of the two runs has, such as the
            results of casts.
        differing: The number of compared results that differ in at least one bit.
        first: The first result that differs in at least one bit, or None if no result differs. If results
            differ on several ranks, ``first`` is the earliest differing result on any rank.
        unexplained: The first difference that rounding does not explain, or None.
        unseen: The largest relative difference that rounding can cause, as the median over all results.
            Errors smaller than ``unseen`` go unnoticed.
        unmeasured: The ops that could not run in fp64, and how often each was called. The results of these
            ops are taken as exact.
        ranks: The ranks that both recordings have. ``ranks`` is empty if both runs had a single process.
        absent_first, absent_second: The ranks whose recording is missing or incomplete, for each of the two
            runs.
        replicas_first, replicas_second: Gradients that differ between the ranks of one recording, although
            their weights started with the same bits. Only the first step with such gradients is listed.
        dropouts_first, dropouts_second: Dropout ops that draw equal masks on shards, or different masks on
            replicas. There is one list for each of the two recordings.
        mesh: Maps the name of each mesh dimension to its size. The micro-batches count as a mesh dimension
            too. ``mesh`` is empty unless a single process was compared with several ranks or micro-batches.
            If ``mesh`` is not empty, ``differing`` counts the results that rounding does not explain, and
            ``first`` equals ``unexplained``.
        random: The number of results that are not compared because the two runs drew different random numbers
            for them.
        is_one_recording: Whether one recording was given twice. Its ranks are then compared with each other,
            and ``absent_second``, ``replicas_second`` and ``dropouts_second`` are empty.
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
    dropouts_first: tuple[Difference, ...] = ()
    dropouts_second: tuple[Difference, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    random: int = 0
    is_one_recording: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether rounding explains all differences, replicas agree, and all recordings are complete."""
        absent = self.absent_first, self.absent_second
        is_complete = not any(ranks.missing or ranks.stopped for ranks in absent)
        replicas, dropouts = (
            self.replicas_first + self.replicas_second,
            self.dropouts_first + self.dropouts_second,
        )
        return is_complete and not (self.unexplained or replicas or dropouts)

    def report(self) -> str:
        """Return all findings as text."""
        headline = self._about_ranks_alone() if self.is_one_recording else self._about_both_runs()
        return "\n\n".join(filter(None, [headline, *self._about_ranks(), *self._about_differences()]))

    def _about_ranks_alone(self) -> str:
        if len(self.ranks) < 2:
            return "one recording of only one process was given twice, so nothing was compared"
        agree = "" if self.replicas_first or self.dropouts_first else "; they agree where they must agree"
        ranks = named_ranks(self.ranks)
        return f"one recording was given twice, so {ranks} are compared with each other{agree}"

    def _about_both_runs(self) -> str:
        alone = f"; {self.only_first} more are only in the first run, {self.only_second} only in the second"
        counts = f"{self.compared} results compared"
        counts += f" on {named_ranks(self.ranks)}" if self.ranks else ""
        if self.mesh:
            sizes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
            counts += (
                f" with those of one process (mesh: {sizes}), {self.differing} differ by more than rounding"
            )
        else:
            counts += f", {self.differing} differ"
        is_equal = self.first is None and not self.mesh
        counts += " (all results that both runs have are equal, bit for bit)" if is_equal else ""
        return counts + alone * bool(self.only_first or self.only_second)

    def _about_ranks(self) -> Iterator[str]:
        first, second = "the recording" if self.is_one_recording else "the first run", "the second run"
        yield from self.absent_first.told(first)
        yield from self.absent_second.told(second)
        for run, replicas in ((first, self.replicas_first), (second, self.replicas_second)):
            for difference in replicas[:_MOST_REPLICAS]:
                yield f"ranks of {run} differ where they must agree: {difference}"
            if hidden := len(replicas) - _MOST_REPLICAS:
                yield f"and {hidden} more gradients" if hidden > 0 else ""
        for run, dropouts in ((first, self.dropouts_first), (second, self.dropouts_second)):
            for difference in dropouts[:1]:
                yield f"dropout on ranks of {run} is wrong: {difference}"

    def _about_differences(self) -> Iterator[str]:
        if self.random:
            yield f"{self.random} results are not compared, because the runs drew different random numbers"
        if self.first is None and not self.mesh:
            return
        if self.first is not None and not self.mesh:
            yield f"first difference: {self.first}"
        unexplained = f"first difference that rounding does not explain: {self.unexplained}"
        yield unexplained if self.unexplained else "rounding explains every difference"
        yield f"relative differences below {self.unseen:.1g} cannot be told from rounding"
        if self.unmeasured:
            ops = listed(self.unmeasured)
            yield f"taken as exact, because these ops do not run in fp64: {ops}"

    def to_dict(self) -> dict[str, Any]:
        """Return the whole comparison as JSON-serializable values."""
        return as_json(self)  # type: ignore[no-any-return]


def compare_runs(
    first: str | Path,
    second: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    layouts: bool = False,
) -> RunComparison:
    """Compare two recordings made by ``record_run``.

    Results are matched by rank, step, direction, module, op and the order in which they were computed. A run
    in bf16 can therefore be compared with a run in fp32, although only the bf16 run has casts. The comparison
    uses the values that each op would have computed without rounding. The allowed difference between two
    results is three times the difference between the inputs of their ops, plus twice the eps of the coarsest
    dtype.

    If only one recording has several ranks, that recording's shards, partial sums and replicas are combined
    before the two recordings are compared. The single process must use the whole batch at each step.

    Args:
        first: A recording. It is a file, or a folder if the run had several ranks.
        second: Another recording. Both recordings must have the same number of ranks, or one of them must
            have a single process. If ``second`` is the same path as ``first``, the ranks of this recording
            are compared with each other.
        names: Maps the names of modules in the first run to their names in the second run, if the runs use
            two implementations of one model. A name stands for a module and all its submodules, and ``*``
            stands for one component of a dotted name.
        layouts: Combine the results of micro-batches. Set this if two single-process runs split the batch
            into different numbers of micro-batches. ``second`` must be the recording with more micro-batches.

    Raises:
        ValueError: A file does not contain a recorded run, or the file of a rank is missing although its
            results are needed. The error is also raised if the two runs have no rank or no result in common.
            Two runs with different numbers of ranks raise the error unless one is a single-process run.
    """
    known = names or {}
    check_names(known)
    files = recorded_files(Path(first)), recorded_files(Path(second))
    ranks = len(files[0]), len(files[1])
    if 1 not in ranks and (ranks[0] != ranks[1] or layouts):
        counts = f"{first} has {ranks[0]} ranks, and {second} has {ranks[1]}"
        msg = f"{counts}; record both with the same number of processes, or one of them with a single process"
        raise ValueError(msg)
    runs = _loaded(files[0]), _loaded(files[1])
    are_layouts = layouts or ranks[0] != ranks[1]
    if are_layouts:
        found = {0: _compared_layouts(files, runs, known)}
    else:
        shared = sorted(runs[0].keys() & runs[1].keys())
        found = {rank: _compared(runs[0][rank], runs[1][rank], known) for rank in shared}
    if not any(result.allowed or result.differing for result in found.values()):
        msg = f"{first} and {second} have no result in common; record the same program twice"
        raise ValueError(msg)
    is_one = not are_layouts and Path(first).resolve() == Path(second).resolve()
    comparison = _comparison(files, runs, found, are_layouts=are_layouts)
    return _of_one_recording(comparison) if is_one else comparison


def _of_one_recording(comparison: RunComparison) -> RunComparison:
    """Return the comparison of a recording with itself, in which each finding stands once."""
    return replace(
        comparison,
        absent_second=AbsentRanks(),
        replicas_second=(),
        dropouts_second=(),
        is_one_recording=True,
    )


def _compared_layouts(
    files: tuple[Sequence[Path], Sequence[Path]],
    runs: tuple[dict[int, Run], dict[int, Run]],
    names: Mapping[str, str],
) -> Compared:
    """Compare a single-process run with a run on several ranks or in micro-batches."""
    for recording in files:
        if missing := missing_ranks(recording):
            msg = (
                f"{named_ranks(missing)} left no file, but the results of all ranks are needed to "
                "combine them; record the run again"
            )
            raise ValueError(msg)
    if not all(run.parts for side in runs for run in side.values()):
        msg = "a recording is empty or was made by an earlier release of amp_plugin; record it again"
        raise ValueError(msg)
    if len(files[1]) == 1 < len(files[0]):
        inverted = {second: first for first, second in names.items()}
        found = compare_layouts(runs[1][0], runs[0], inverted)
        return found._replace(only_first=found.only_second, only_second=found.only_first)
    return compare_layouts(runs[0][0], runs[1], names)


def _comparison(
    files: tuple[Sequence[Path], Sequence[Path]],
    runs: tuple[dict[int, Run], dict[int, Run]],
    found: Mapping[int, Compared],
    *,
    are_layouts: bool,
) -> RunComparison:
    """Return all findings as one comparison.

    ``found`` maps each rank to its comparison. If layouts are compared, one comparison covers all ranks.
    """
    is_by_rank = len(files[0]) > 1 and not are_layouts
    differing = {rank: result.differing for rank, result in found.items()}
    unexplained = {
        rank: [entry for entry in entries if not entry[1].is_rounding] for rank, entries in differing.items()
    }
    have_ranks = is_by_rank or are_layouts
    absent = [_absent(*side) if have_ranks else AbsentRanks() for side in zip(files, runs, strict=True)]
    ranks = max(map(tuple, runs), key=len) if are_layouts else tuple(found)
    unmeasured = [Counter(run.unmeasured) for side in runs for run in side.values()]
    return RunComparison(
        compared=sum(len(result.allowed) for result in found.values()),
        only_first=sum(result.only_first for result in found.values()),
        only_second=sum(result.only_second for result in found.values()),
        differing=sum(map(len, differing.values())),
        first=_earliest(differing, is_by_rank=is_by_rank),
        unexplained=_earliest(unexplained, is_by_rank=is_by_rank),
        unseen=median([allowed for result in found.values() for allowed in result.allowed] or [0.0]),
        unmeasured=dict(reduce(or_, unmeasured, Counter())),
        ranks=ranks if is_by_rank or len(ranks) > 1 else (),
        absent_first=absent[0],
        absent_second=absent[1],
        replicas_first=_unlike_replicas(runs[0]),
        replicas_second=_unlike_replicas(runs[1]),
        dropouts_first=tuple(wrong_dropouts(runs[0])),
        dropouts_second=tuple(wrong_dropouts(runs[1])),
        mesh={axis.name: axis.size for result in found.values() for axis in result.axes},
        random=sum(result.random for result in found.values()),
    )


def _loaded(files: Sequence[Path]) -> dict[int, Run]:
    missing = missing_ranks(files)
    return {rank: Run.load(file) for rank, file in enumerate(files) if rank not in missing}


def _absent(files: Sequence[Path], runs: Mapping[int, Run]) -> AbsentRanks:
    stopped = tuple(rank for rank, run in runs.items() if not run.is_whole)
    return AbsentRanks(missing=missing_ranks(files), stopped=stopped)


def _earliest(
    found: Mapping[int, Sequence[tuple[int, Difference]]], *, is_by_rank: bool
) -> Difference | None:
    """Return the difference that comes first in the program, with the ranks on which the result differs."""
    firsts = {rank: differences[0] for rank, differences in found.items() if differences}
    if not firsts:
        return None
    number, difference = min(firsts.values(), key=lambda entry: entry[0])
    ranks = tuple(rank for rank, (other, _) in firsts.items() if other == number)
    return replace(difference, ranks=ranks) if is_by_rank else difference


def _unlike_replicas(runs: Mapping[int, Run]) -> tuple[Difference, ...]:
    """Find the first step in which gradients differ between replicas, and return these gradients."""
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
    """Compare the gradients of one weight across all ranks, and describe how they differ.

    Return None if rounding can explain the difference.
    """
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


def _compared(ours: Run, theirs: Run, names: Mapping[str, str]) -> Compared:
    keys, others = _by_place(ours.records, {}), _by_place(theirs.records, names)
    shared = {number: others[key] for key, number in keys.items() if key in others}
    matched = (ours, shared.keys()), (theirs, set(shared.values()))
    alone = [
        {number: record for number, record in enumerate(run.records) if number not in numbers}
        for run, numbers in matched
    ]
    allowed, differing = [], []
    largest = 0.0  # the largest difference so far that rounding can explain
    for number, other in shared.items():
        mine, its = ours.records[number], theirs.records[other]
        # A gradient may be the sum of several earlier results, and may differ as much as any of them.
        known = largest if number in ours.gradients else 0.0
        judged = _judged(mine, its, alone, largest, known)
        allowed.append(judged.allowed)
        if judged.is_rounding:
            largest = max(largest, judged.relative)
        if (mine.dtype, mine.checksum) != (its.dtype, its.checksum):
            differing.append((number, judged))
    return Compared(allowed, len(alone[0]), len(alone[1]), differing)


def _judged(
    mine: OpRecord, its: OpRecord, alone: Sequence[Mapping[int, OpRecord]], largest: float, inputs: float
) -> Difference:
    """Compare a result, or an input of the op that computed it, between the two runs.

    An input is compared if it comes from an op that only one run has. If the input differs between the runs
    by more than the tolerance, the difference of that input is returned.

    ``largest`` is the largest difference so far that rounding can explain. ``inputs`` is a lower bound on the
    difference between the inputs in the two runs. If the fingerprints of the inputs differ by more than
    ``inputs``, the larger difference is used.
    """
    slack, reason = 2 * max(mine.eps, its.eps), ""
    relative = mine.held.difference(its.held)
    for read, other in zip(mine.reads, its.reads, strict=False):
        apart, allowed = read.difference(other), _GROWTH * largest + slack
        maker = alone[0].get(read.made_by) or alone[1].get(other.made_by)
        if maker is not None and apart > allowed:
            relative, reason = apart, f"an input comes from {maker}, which only one of the runs has"
            break
        inputs = max(inputs, apart)
    else:
        allowed = _GROWTH * (inputs + mine.taken + its.taken) + slack
        if inputs and mine.held.is_discrete:
            allowed += math.sqrt(4 / max(math.prod(mine.shape), 1))  # one element may always change
        low, high = sorted((mine.excess, its.excess))
        if high > 1 >= low:
            reason = f"in only one of the runs, the op's own error is {high:.2g} times what rounding allows"
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


def _by_place(records: Sequence[OpRecord], names: Mapping[str, str]) -> dict[tuple[object, ...], int]:
    counts: Counter[tuple[object, ...]] = Counter()
    placed: dict[tuple[object, ...], int] = {}
    for number, record in enumerate(records):
        place = (record.step, record.direction, name_in_first(names, record.module), record.op)
        placed[(*place, counts[place], record.shape)] = number
        counts[place] += 1
    return placed
