"""Find gradients that should be the same on all ranks of one recording, but differ.

a weight is a replica if it had the same bits on all ranks before its first step

a constant weight, such as a new bias of zeros, is equal on all ranks whether or not it is a replica

    a constant weight counts as a replica only if the other weights of its module are replicas

for each step, in order

    compare each replica's gradients across the ranks

    if the gradients differ by more than rounding, an all-reduce is missing or superfluous

    stop at the first step with differences, because differences in later steps follow from them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from amp_plugin.numerics.recorded import Weight


def replicas_of(ranks: Sequence[Mapping[str, Weight]]) -> set[str]:
    """Return the names of the weights that are replicated on all ranks."""
    if len(ranks) < 2:
        return set()
    shared = set.intersection(*(set(weights) for weights in ranks))
    equal = {name for name in shared if len({weights[name].held.checksum for weights in ranks}) == 1}
    telling = {name for name in shared if not all(weights[name].is_constant for weights in ranks)}

    def is_replica(name: str) -> bool:
        if name in telling:
            return name in equal
        module = {other for other in telling if _module(other) == _module(name)}
        evidence = module or telling
        return name in equal and bool(evidence) and evidence <= equal

    return {name for name in shared if is_replica(name)}


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def unlike_the_others(checksums: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks whose checksum differs from that of most ranks.

    If no checksum is shared by more than half of the ranks, return all ranks.
    """
    (common, count), *_ = Counter(checksums.values()).most_common(1)
    if 2 * count <= len(checksums):
        return tuple(checksums)
    return tuple(rank for rank, checksum in checksums.items() if checksum != common)
