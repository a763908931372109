"""Compare a single-process run with a run of the same training on several ranks or in micro-batches.

1. layout_matches.py pairs each result of the single-process run with the matching results of the ranks.
2. layout_rounding.py decides for each pair of results whether rounding explains the difference.
3. layout_causes.py explains the first difference that rounding does not explain.

Even in a correct program, an intermediate result on a rank may differ from the same result in the
single-process run. For example, an embedding with sharded rows looks up wrong rows for some tokens and masks
them afterwards. A result that differs is therefore ignored if the later results that are computed from it are
equal in both runs, except for rounding. A difference is also reported if none of the
later results computed from the differing result exists in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from amp_plugin.numerics.layout_causes import cause_in_gradient, explained, wrong_ranks
from amp_plugin.numerics.layout_matches import Match, Matches
from amp_plugin.numerics.layout_rounding import Verdict, verdicts
from amp_plugin.numerics.layouts import Layout, Piece
from amp_plugin.numerics.module_names import name_in_first
from amp_plugin.numerics.recorded import Compared, Difference, Run

_KERNEL_ERROR = 2.0  # times the error that rounding allows

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def compare_layouts(whole: Run, runs: Mapping[int, Run], names: Mapping[str, str]) -> Compared:
    """Compare a single-process run with a run on several ranks or in micro-batches.

    Args:
        whole: The single-process run.
        runs: Maps each rank to its run.
        names: Maps module names of the single-process run to those of the ranks.

    Returns:
        The results that differ by more than rounding can explain, in the order in which the single process
            computed them. The first of these results comes with a likely cause.
    """
    matches = Matches(whole, runs, names)
    judged = verdicts(matches)
    compared = [match for match in matches.all if not judged[match.number].is_random]
    arrives = _arrival(matches, judged)
    wrong = [
        (match, found)
        for match in compared
        for verdict in [judged[match.number]]
        if not (found := _difference(match, verdict)).is_rounding
        if match.is_gradient or verdict.is_equal or arrives(match)
    ]
    differing = [(-1, found) for found in _begun(matches, names)]
    if wrong and not differing:
        match, found = wrong[0]
        wrong[0] = match, explained(found, match, matches, judged)
    return Compared(
        allowed=[judged[match.number].allowed for match in compared],
        only_first=len(whole.records) - len(matches.all),
        only_second=sum(len(run.records) for run in runs.values()) - len(matches.theirs),
        differing=[*differing, *((match.number, found) for match, found in wrong)],
        random=len(matches.all) - len(compared),
        axes=matches.axes(matches.micro_batches),
    )


def _arrival(matches: Matches, judged: Mapping[int, Verdict]) -> Callable[[Match], bool]:
    """Return a function that decides whether to report a result that differs.

    The function returns True if a later result that depends on the differing result also differs. The
    function also returns True if the two runs have no later result in common that depends on it.
    """
    readers = _readers(matches.runs)

    def next_shared(rank: int, number: int) -> Iterator[int]:
        """Yield the nearest results that were computed from this result and exist in both runs.

        From a forward result, only forward results are searched. From a backward result, only backward
        results are searched.
        """
        seen, left = {number}, [number]
        records = matches.runs[rank].records
        while left:
            for reader in readers.get((rank, left.pop()), ()):
                if records[reader].direction != records[number].direction:
                    continue
                matched = matches.theirs.get((rank, reader))
                if matched is not None:
                    yield matched
                elif reader not in seen:
                    seen.add(reader)
                    left.append(reader)

    def arrives(match: Match) -> bool:
        reached = {shared for entry in match.pieces.values() for shared in next_shared(*entry)}
        return not reached or not all(judged[number].is_equal for number in reached)

    return arrives


def _readers(runs: Mapping[int, Run]) -> dict[tuple[int, int], list[int]]:
    """Map (rank, index of a result) to the indices of the rank's results that are computed from it."""
    readers: dict[tuple[int, int], list[int]] = {}
    for rank, run in runs.items():
        for number, record in enumerate(run.records):
            for made_by in {read.made_by for read in record.reads}:
                readers.setdefault((rank, made_by), []).append(number)
    return readers


def _begun(matches: Matches, names: Mapping[str, str]) -> Iterator[Difference]:
    """Yield the weights that differ between the two runs before the first step."""
    named = {
        matches.mesh.places[rank]: {
            name_in_first(names, name): weight for name, weight in run.weights.items()
        }
        for rank, run in matches.runs.items()
    }
    for name, weight in matches.whole.weights.items():
        weights = {place: own[name] for place, own in named.items() if name in own}
        layout = Layout(
            whole=Piece(weight.held, weight.part),
            pieces={place: Piece(other.held, other.part) for place, other in weights.items()},
            axes=matches.mesh.axes,
        )
        if not weights or not layout.is_comparable:
            continue
        dtypes = [weight.dtype, *(other.dtype for other in weights.values())]
        slack = 2 * max(_EPS.get(dtype, 2.0**-10) for dtype in dtypes)
        best = min(layout.strict_ways(), key=lambda way: way.relative, default=None)
        if best is None or best.relative <= slack:
            continue
        module, _, own_name = name.rpartition(".")
        cause = cause_in_gradient(layout, best, slack)
        yield Difference(
            result=f"weight {own_name}{f' in {module}' if module else ''}, before the first step",
            op=f"weight {own_name}",
            module=module,
            relative=best.relative,
            allowed=slack,
            reason=cause.text or "the two runs begin with different weights",
            ranks=wrong_ranks(layout, best, slack, matches.mesh),
            mesh=tuple(axis.name for axis in cause.axes),
        )


def _difference(match: Match, verdict: Verdict) -> Difference:
    mine, theirs = match.mine, match.theirs
    low, high = sorted((mine.excess, max(record.excess for record in theirs)))
    is_of_kernel = verdict.is_rounding and high > _KERNEL_ERROR and low <= 1
    return Difference(
        result=f"{mine}",
        op=mine.op,
        module=mine.module,
        line=theirs[0].line or mine.line,
        relative=verdict.best.relative,
        allowed=verdict.allowed * verdict.best.condition,
        reason=f"in only one of the runs, the op's own error is {high:.2g} times what rounding allows"
        if is_of_kernel
        else "",
        is_rounding=verdict.is_rounding and not is_of_kernel,
        ranks=tuple(sorted({rank for rank, _ in match.pieces.values()})),
    )
