"""Check dropout on several ranks. Dropout must be the same on replicas, and must differ on shards.

for each product of a tensor with a random mask that drops elements:

    if two ranks have the same tensor, their masks must be the same

    if two ranks have different tensors, their masks must differ
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from amp_plugin.numerics.layouts import Coordinates
from amp_plugin.numerics.process_mesh import ProcessMesh
from amp_plugin.numerics.recorded import Difference, OpRecord, Run
from amp_plugin.numerics.values import Fingerprint


def wrong_dropouts(runs: Mapping[int, Run]) -> list[Difference]:
    """Return the dropouts whose masks are equal on shards, or different on replicas.

    Args:
        runs: The runs of all ranks.
    """
    mesh = ProcessMesh(runs)
    if not mesh.axes:
        return []
    found = {rank: list(_dropouts(run)) for rank, run in runs.items()}
    if len({len(dropouts) for dropouts in found.values()}) != 1:
        return []
    judged = []
    for drops in zip(*found.values(), strict=True):
        by_place = {mesh.places[rank]: drop for rank, drop in zip(found, drops, strict=True)}
        wrong = _wrong_dropout(by_place, mesh)
        if wrong is not None:
            judged.append(wrong)
    return judged


# the product, the tensor from which elements are dropped, and the random mask
_Dropout = tuple[OpRecord, Fingerprint, Fingerprint]


def _dropouts(run: Run) -> Iterator[_Dropout]:
    """Yield the products of a tensor with a random mask that drops elements."""
    noisy: set[int] = set()
    for number, record in enumerate(run.records):
        base = record.base
        if base == "bernoulli":
            noisy.add(number)
        elif base == "native_dropout" and record.held.is_discrete and record.reads:
            yield record, record.reads[0], record.held
        elif record.reads and all(read.made_by in noisy for read in record.reads):
            noisy.add(number)
        elif base == "mul" and record.direction == "forward" and len(record.reads) == 2:
            value, noise = sorted(record.reads, key=lambda read: read.made_by in noisy)
            if noise.made_by in noisy:
                yield record, value, noise


def _wrong_dropout(drops: Mapping[Coordinates, _Dropout], mesh: ProcessMesh) -> Difference | None:
    for number, axis in enumerate(mesh.axes):
        for place, drop in drops.items():
            first = drops[(*place[:number], 0, *place[number + 1 :])]
            if drop is first:
                continue
            (record, value, noise), (other, its_value, its_noise) = drop, first
            is_replica = value.difference(its_value) <= 8 * max(record.eps, other.eps)
            apart = its_noise.difference(noise)
            if is_replica == (apart == 0):
                continue
            what = (
                "these ranks have the same input, so dropout must drop the same elements, but it does not"
                if is_replica
                else "these ranks have different inputs, but dropout drops the same elements on them"
            )
            ranks = sorted(mesh.ranks[at] for at in (place, (*place[:number], 0, *place[number + 1 :])))
            return Difference(
                result=f"{record}",
                op=record.op,
                module=record.module,
                line=record.line,
                relative=apart,
                allowed=0.0,
                reason=what,
                ranks=tuple(ranks),
                mesh=(axis.name,),
            )
    return None
