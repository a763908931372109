"""Dropout on several ranks: the same where they hold the same tensor, another one where they hold shards.

for each product of a tensor and of random numbers that keep or drop its elements:
    two ranks have the same tensor: their random numbers must be the same
    they have different tensors: their random numbers must differ
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from amp_plugin.numerics.layouts import Coordinates
from amp_plugin.numerics.process_mesh import ProcessMesh
from amp_plugin.numerics.recorded import Difference, OpRecord, Run
from amp_plugin.numerics.values import Fingerprint


def wrong_dropouts(runs: Mapping[int, Run]) -> list[Difference]:
    """Return where dropout is the same on ranks with other inputs, or differs on ranks with the same input.

    Args:
        runs: of all ranks.
    """
    mesh = ProcessMesh(runs)
    if not mesh.axes:
        return []
    found = {rank: list(_dropouts(run)) for rank, run in runs.items()}
    if len({len(dropouts) for dropouts in found.values()}) != 1:
        return []
    judged = []
    for drops in zip(*found.values(), strict=True):
        by_place = {mesh.place(rank): drop for rank, drop in zip(found, drops, strict=True)}
        wrong = _wrong_dropout(by_place, mesh)
        if wrong is not None:
            judged.append(wrong)
    return judged


class _Dropout(NamedTuple):
    record: OpRecord
    value: Fingerprint  # what is dropped from
    noise: Fingerprint


def _dropouts(run: Run) -> Iterator[_Dropout]:
    """Yield the products of a tensor and of random numbers that keep or drop its elements."""
    noisy: set[int] = set()
    for number, record in enumerate(run.records):
        base = record.base
        if base == "bernoulli":
            noisy.add(number)
        elif base == "native_dropout" and record.held.is_discrete and record.reads:
            yield _Dropout(record, record.reads[0], record.held)
        elif record.reads and all(read.made_by in noisy for read in record.reads):
            noisy.add(number)
        elif base == "mul" and record.direction == "forward" and len(record.reads) == 2:
            value, noise = sorted(record.reads, key=lambda read: read.made_by in noisy)
            if noise.made_by in noisy:
                yield _Dropout(record, value, noise)


def _wrong_dropout(drops: Mapping[Coordinates, _Dropout], mesh: ProcessMesh) -> Difference | None:
    for number, axis in enumerate(mesh.axes):
        for place, drop in drops.items():
            first = drops[(*place[:number], 0, *place[number + 1 :])]
            if drop is first:
                continue
            slack = 8 * max(drop.record.eps, first.record.eps)
            is_replica = drop.value.difference(first.value) <= slack
            apart = first.noise.difference(drop.noise)
            if is_replica == (apart == 0):
                continue
            what = (
                "its input is the same on these ranks, and dropout differs"
                if is_replica
                else "its input differs between these ranks, and dropout is the same"
            )
            ranks = sorted(mesh.ranks[at] for at in (place, (*place[:number], 0, *place[number + 1 :])))
            return Difference(
                result=f"{drop.record}",
                op=drop.record.op,
                module=drop.record.module,
                line=drop.record.line,
                relative=apart,
                allowed=0.0,
                reason=what,
                ranks=tuple(ranks),
                mesh=(axis.name,),
            )
    return None
