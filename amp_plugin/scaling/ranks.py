"""Combines norms and overflow flags, so that all ranks make the same decision.

One op packs norm**p and the overflow flag into one tensor. Collectives add up the packed tensors, and another
op computes the norm from the sum. Along a mesh dimension that shards a gradient, norm**p is added up. Along a
mesh dimension that replicates a gradient, norm**p is first divided by the size of the dimension. At the end
the overflow flag is set to exactly 0 or 1. The CPU's fused AdamW would not skip a step if found_inf were 2.0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_plugin.hardware import widest_float
from amp_plugin.kernels import ops  # noqa: F401 -- defines torch.ops.amp_plugin
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.scaling.gradients import Measurement, ShardLayout
from amp_plugin.scaling.loss_scale import moved

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OPS = torch.ops.amp_plugin

_GROUPS_ARE_HERE = (
    "a GradScaler with process_groups or sharded_groups cannot be pickled, because the groups belong to this "
    "process: save its state_dict() and load it into a scaler made with the new groups."
)


class Ranks:
    """The processes that decide together whether to skip a step.

    Args:
        agree: Process groups whose ranks must all take a step or all skip it.
        sharded: Process groups whose ranks hold different shards of gradients. A gradient norm is combined
            from the shards of all ranks of a group. All ranks of a group also take or skip a step together.
    """

    def __init__(self, agree: Sequence[ProcessGroup] = (), sharded: Sequence[ProcessGroup] = ()) -> None:
        self._agree, self._sharded = tuple(agree), tuple(sharded)
        self._core_agreed = not self

    def __bool__(self) -> bool:
        """Return whether there is any group."""
        return bool(self._agree or self._sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return the same object, because process groups cannot be copied."""
        return self

    def __getstate__(self) -> Any:
        """Raise RuntimeError if there are process groups, which cannot be pickled."""
        if self:
            raise RuntimeError(_GROUPS_ARE_HERE)
        return vars(self)

    def are_of(self, agree: Sequence[ProcessGroup], sharded: Sequence[ProcessGroup]) -> bool:
        """Return whether the groups are these."""
        return (self._agree, self._sharded) == (tuple(agree), tuple(sharded))

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
            measurements: The measurements of this rank.
            norm_type: The p of the p-norm.
            device: The device of the results.
            layouts: Every shard layout that gradients can have, in the same order on all ranks.
            earlier: Overflow flags found earlier (float32, 0-dim).

        Returns:
            Two tensors (float32, 0-dim). The first is the norm of all gradients. The second is 1.0 if there
            is an overflow, else 0.0.
        """
        if not self._core_agreed:
            _agree_on_core((*self._agree, *self._sharded), device)
            self._core_agreed = True
        flags = [moved(flag, device) for flag in (*(found.found_inf for found in measurements), *earlier)]
        if len(measurements) == 1 and measurements[0].layout is None and not (self or layouts):
            return moved(measurements[0].norm, device), reduce(torch.maximum, flags)
        packed = []
        for layouts_here, ranks in self._places(measurements, layouts):
            values = _pack(measurements, layouts_here, flags, norm_type, device)
            ranks.all_reduce(values, norm_type)
            flags = [values[-1]]  # every collective includes the overflow flag, so all ranks get it
            packed.append(values)
        norm, found = _OPS.unpack_measurements(packed, norm_type)
        return norm, found

    def _places(self, measurements: Sequence[Measurement], layouts: Sequence[ShardLayout]) -> list[_Place]:
        """Group the shard layouts, so that the norms of one group are combined over the same ranks."""
        seen = [found.layout for found in measurements]
        by_mesh: dict[DeviceMesh, dict[ShardLayout | None, None]] = {}
        for layout in (*layouts, *seen):
            if layout is not None:
                by_mesh.setdefault(layout.mesh, {})[layout] = None
        places: list[_Place] = []
        for mesh, spread in by_mesh.items():
            along = Ranks(sharded=[mesh.get_group(dim) for dim in range(mesh.ndim)])
            places.append((tuple(spread), along))
        return [*places, ((None,), self)] if self or None in seen or not places else places

    def all_reduce(self, packed: Tensor, norm_type: float) -> None:
        """Combine the packed tensors of all ranks in place, with one collective for each process group."""
        reduce_op = torch.distributed.ReduceOp
        for group in self._sharded:
            op = reduce_op.MAX if math.isinf(norm_type) else reduce_op.SUM
            torch.distributed.all_reduce(packed, op, group=group)
        for group in self._agree:
            torch.distributed.all_reduce(packed[-1], reduce_op.MAX, group=group)


_Place = tuple[tuple[ShardLayout | None, ...], Ranks]


def _pack(
    measurements: Sequence[Measurement],
    layouts: tuple[ShardLayout | None, ...],
    flags: list[Tensor],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Pack the numbers that ranks add up: the power of each layout, and the flag. One op."""
    members = [found for found in measurements if found.layout in layouts]
    packed = torch.empty(len(layouts) + 1, dtype=widest_float(device), device=device)
    norms = [moved(found.norm, device) for found in members]
    slots = [layouts.index(found.layout) for found in members]
    replicas = [1 if layout is None else layout.replicas() for layout in layouts]
    _OPS.pack_measurements_(packed, norms, flags, slots, replicas, norm_type)
    return packed


def _agree_on_core(groups: Sequence[ProcessGroup], device: torch.device) -> None:
    """Raise unless all ranks use the same native core and CUDA kernels, so that results agree bitwise."""
    cuda = cuda_core(device.index).identity if device.type == "cuda" else 0
    loaded = torch.tensor([float(native_core().loaded), float(cuda)], device=device)
    most, least = loaded, -loaded
    for group in groups:
        votes = torch.stack([most, least])
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=group)
        most, least = votes.unbind()
    cores = ("native core", "CUDA kernels")
    for name, any_has, all_have in zip(cores, most.tolist(), (-least).tolist(), strict=True):
        if any_has != all_have:
            msg = (
                f"some ranks have amp_plugin's {name} and others do not, or have others (for another GPU, by "
                "another NVRTC), and these differ in the last bits; "
                "run `amp-plugin doctor` on every machine, which says what is missing, or set "
                "AMP_PLUGIN_NATIVE=0 on all"
            )
            raise RuntimeError(msg)


def rank_of_process() -> int | None:
    """Return the rank of this process, or None if the rank is unknown.

    The rank comes from torch.distributed if it is initialized, or else from the environment variable RANK.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else None
