"""One decision and one norm for all ranks.

Norm (to its power) and overflow flag travel together, packed by one op and read by another.
Along a mesh dimension that shards a gradient the powers add up; along one that replicates it
they are the same on every rank and are divided by its size first. The flag is added up too and
cut back to exactly 0 or 1 at the end: the CPU's fused AdamW steps on a found_inf of 2.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_plugin.kernels import ops  # noqa: F401 -- defines torch.ops.amp_plugin
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.moves import moved
from amp_plugin.scaling.shard_layout import ShardLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_CORES = ("native core", "CUDA kernels")
_OPS = torch.ops.amp_plugin


class Groups(NamedTuple):
    """Process groups a scaler was given.

    Attributes:
        agree: All their ranks take the same decision.
        sharded: Their ranks hold different parts of the plain (not DTensor) gradients,
            as FSDP1's do: norms are added up over them.
    """

    agree: tuple[ProcessGroup, ...] = ()
    sharded: tuple[ProcessGroup, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any group."""
        return bool(self.agree or self.sharded)


class Ranks:
    """The processes that decide together.

    Args:
        groups: The groups the scaler was given; DTensors bring their meshes themselves.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._core_agreed = not groups

    def combine(
        self,
        measurements: Sequence[Measurement],
        norm_type: float,
        device: torch.device,
        layouts: Sequence[ShardLayout],
        earlier: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """Combine the measurements of all devices and ranks.

        Args:
            measurements: This rank's; may be empty.
            norm_type: The p of the norms.
            device: Where the results go.
            layouts: All shard layouts of the optimizer's *parameters*, the same list on every rank, so
                that a rank without gradients takes part too.
            earlier: Overflow flags of this rank from before these measurements.

        Returns:
            Norm and found_inf over all ranks, float32, 0-dim, on ``device``.

        Raises:
            RuntimeError: Some ranks have the native core and others do not.
        """
        if len(measurements) == 1 and not (self.groups or layouts):
            norm = moved(measurements[0].norm, device)
            found = moved(measurements[0].found_inf, device)
            for flag in earlier:
                found = torch.maximum(found, moved(flag, device))
            return norm, found
        if not self._core_agreed:
            _agree_on_core(self.groups, device)
            self._core_agreed = True
        flags = [moved(flag, device) for flag in (*(found.found_inf for found in measurements), *earlier)]
        packed = []
        for place in self._places(measurements, layouts):
            values = place.pack(norm_type, flags, device)
            place.all_reduce(values, norm_type)
            flags = [values[-1]]  # goes through every collective: all learn of it
            packed.append(values)
        norm, found = _OPS.unpack_measurements(packed, norm_type)
        return norm, found

    def _places(self, measurements: Sequence[Measurement], layouts: Sequence[ShardLayout]) -> list[_Place]:
        """Sort the measurements by the ranks that combine them: those of each mesh, then the given groups."""
        of_measurements = (found.layout for found in measurements if found.layout is not None)
        by_mesh: dict[DeviceMesh, dict[ShardLayout | None, None]] = {}
        for layout in (*layouts, *of_measurements):
            by_mesh.setdefault(layout.mesh, {})[layout] = None
        places = []
        for mesh, spread in by_mesh.items():
            groups = Groups(sharded=tuple(mesh.get_group(dim) for dim in range(mesh.ndim)))
            places.append(_Place(tuple(spread), groups, measurements))
        plain = _Place((None,), self.groups, measurements)
        return [*places, plain] if self.groups or plain.members or not places else places


class _Place:
    """The ranks that combine some of the measurements.

    Args:
        layouts: How those gradients are spread; None for plain ones.
        groups: The ranks' process groups.
        measurements: Those of all places.
    """

    def __init__(
        self, layouts: tuple[ShardLayout | None, ...], groups: Groups, measurements: Sequence[Measurement]
    ) -> None:
        self._layouts = layouts
        self._groups = groups
        self.members = [found for found in measurements if found.layout in layouts]

    def pack(self, norm_type: float, flags: list[Tensor], device: torch.device) -> Tensor:
        """Return what the ranks add up: the power of each layout, and the flag; one op."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        packed = torch.empty(len(self._layouts) + 1, dtype=wide, device=device)
        norms = [moved(found.norm, device) for found in self.members]
        slots = [self._layouts.index(found.layout) for found in self.members]
        replicas = [1 if layout is None else layout.replicas() for layout in self._layouts]
        _OPS.pack_measurements_(packed, norms, flags, slots, replicas, norm_type)
        return packed

    def all_reduce(self, packed: Tensor, norm_type: float) -> None:
        """Join the measurements of all ranks, in place: one collective for each group."""
        reduce_op = torch.distributed.ReduceOp
        op = reduce_op.MAX if math.isinf(norm_type) else reduce_op.SUM
        for group in self._groups.sharded:
            torch.distributed.all_reduce(packed, op, group=group)
        for group in self._groups.agree:
            torch.distributed.all_reduce(packed[-1], reduce_op.MAX, group=group)


def _agree_on_core(groups: Groups, device: torch.device) -> None:
    """Check that all ranks have the native core, or none, and the same CUDA kernels, or none.

    Others compute the same to the last few bits only; replicated parameters would drift apart.
    """
    cuda = cuda_core(device.index).identity if device.type == "cuda" else 0
    loaded = torch.tensor([float(native_core().loaded), float(cuda)], device=device)
    most, least = loaded, -loaded
    for group in (*groups.agree, *groups.sharded):
        votes = torch.stack([most, least])
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=group)
        most, least = votes.unbind()
    for name, any_has, all_have in zip(_CORES, most.tolist(), (-least).tolist(), strict=True):
        if any_has != all_have:
            msg = (
                f"some ranks have amp_plugin's {name} and others do not, or have others (for another GPU, by "
                "another NVRTC), and these differ in the last bits; "
                "run `amp-plugin doctor` on every machine, which says what is missing, or set "
                "AMP_PLUGIN_NATIVE=0 on all"
            )
            raise RuntimeError(msg)
