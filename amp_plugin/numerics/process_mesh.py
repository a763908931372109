"""Arrange the ranks of a recorded run as a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from amp_plugin.numerics.layouts import Coordinates
from amp_plugin.numerics.parts import Axis
from amp_plugin.numerics.recorded import Run


class ProcessMesh:
    """The ranks of a run, arranged as a mesh.

    Args:
        runs: Maps each rank to its run. If the runs contain a device mesh, the dimensions of that mesh are
            used. Without a device mesh, the ranks have the single dimension ``"ranks"``.
    """

    def __init__(self, runs: Mapping[int, Run]) -> None:
        known = max((run.mesh for run in runs.values()), key=len)
        axes = [*known]
        places = {rank: tuple(run.mesh.values()) for rank, run in runs.items()}
        if len({len(place) for place in places.values()}) > 1:  # a rank may have ended before its first step
            axes, places = [], dict.fromkeys(runs, ())
        sharing: Counter[Coordinates] = Counter()
        for rank, place in places.items():  # several groups of ranks may each have a mesh of this shape
            places[rank] = (sharing[place], *place)
            sharing[place] += 1
        outer = Axis("ranks" if not axes else "other ranks", max(sharing.values()))
        self.axes = (outer, *axes)
        if outer.size == 1:
            self.axes = self.axes[1:]
            places = {rank: place[1:] for rank, place in places.items()}
        # Maps each rank to its coordinates.
        self.places = places

    @property
    def ranks(self) -> dict[Coordinates, int]:
        """A dict that maps coordinates to the rank there."""
        return {place: rank for rank, place in self.places.items()}

    def axes_of(self, groups: Iterable[Sequence[int]]) -> tuple[Axis, ...]:
        """Return the mesh dimensions along which ranks of the same process group differ."""
        found = []
        for number, axis in enumerate(self.axes):
            if any(
                len({self.places[rank][number] for rank in group if rank in self.places}) > 1
                for group in groups
            ):
                found.append(axis)
        return tuple(found)
