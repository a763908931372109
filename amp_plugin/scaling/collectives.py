"""One decision and one norm for all ranks.

Norm (to its power) and overflow flag travel together. Along a mesh dimension that shards
a gradient the powers add up; along one that replicates it they are the same on every rank
and are divided by its size first. The flag is added up too and cut back to exactly 0 or 1
at the end: the CPU's fused AdamW steps on a found_inf of 2.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.moves import moved
from amp_plugin.scaling.shard_layout import ShardLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_CORES = ("native core", "CUDA kernels")


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
        by_layout: dict[ShardLayout | None, list[Measurement]] = {**{key: [] for key in layouts}, None: []}
        for measurement in measurements:
            by_layout.setdefault(measurement.layout, []).append(measurement)
        flag = _local_flag([*(measurement.found_inf for measurement in measurements), *earlier], device)
        powers = []
        for layout, members in by_layout.items():  # the flag goes through every collective: all learn of it
            pair = torch.stack([_local_power(members, norm_type, device), flag])
            pair = (
                _over_mesh(pair, norm_type, layout) if layout else _over_groups(pair, norm_type, self.groups)
            )
            power, flag = pair.unbind()
            powers.append(power)
        total = powers[0] if len(powers) == 1 else torch.stack(powers)
        return _norm_of(total, norm_type).float(), (flag > 0).float()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _local_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    if not flags:
        return torch.zeros((), dtype=_wide(device), device=device)
    here = [moved(flag, device) for flag in flags]
    return (here[0] if len(here) == 1 else torch.stack(here).max()).to(_wide(device))


def _local_power(measurements: Sequence[Measurement], norm_type: float, device: torch.device) -> Tensor:
    """This rank's norm to its power, 0-dim; what is neutral if nothing was measured."""
    if not measurements:
        neutral = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), neutral, dtype=_wide(device), device=device)
    norms = [moved(measured.norm, device) for measured in measurements]
    wide = (norms[0] if len(norms) == 1 else torch.stack(norms)).to(_wide(device))
    return _add_up(wide if _has_no_power(norm_type) else wide.pow(norm_type), norm_type)


def _has_no_power(norm_type: float) -> bool:
    return norm_type == 0 or math.isinf(norm_type)


def _add_up(powers: Tensor, norm_type: float) -> Tensor:
    if powers.dim() == 0:
        return powers
    if norm_type == math.inf:
        return powers.max()
    return powers.min() if norm_type == -math.inf else powers.sum()


def _norm_of(powers: Tensor, norm_type: float) -> Tensor:
    total = _add_up(powers, norm_type)
    return total if _has_no_power(norm_type) else total.pow(1.0 / norm_type)


def _all_reduce(pair: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """Join power and flag over one group, in place: one collective."""
    op = torch.distributed.ReduceOp.MAX if math.isinf(norm_type) else torch.distributed.ReduceOp.SUM
    if norm_type == -math.inf:  # -max(-x) is min(x)
        pair[0].neg_()
    torch.distributed.all_reduce(pair, op, group=group)
    if norm_type == -math.inf:
        pair[0].neg_()
    return pair


def _over_mesh(pair: Tensor, norm_type: float, layout: ShardLayout) -> Tensor:
    for dim, sharded in enumerate(layout.sharded):
        if not sharded and not math.isinf(norm_type):
            pair[0].div_(layout.mesh.size(dim))
        pair = _all_reduce(pair, norm_type, layout.mesh.get_group(dim))
    return pair


def _over_groups(pair: Tensor, norm_type: float, groups: Groups) -> Tensor:
    for group in groups.sharded:
        pair = _all_reduce(pair, norm_type, group)
    for group in groups.agree:
        torch.distributed.all_reduce(pair[1], torch.distributed.ReduceOp.MAX, group=group)
    return pair


def _agree_on_core(groups: Groups, device: torch.device) -> None:
    """Check that all ranks have the native core, or none, and so with the CUDA kernels.

    With and without they compute the same to the last few bits only; replicated parameters would drift apart.
    """
    cuda = device.type == "cuda" and cuda_core(device.index).loaded
    loaded = torch.tensor([float(native_core().loaded), float(cuda)], device=device)
    most, least = loaded, -loaded
    for group in (*groups.agree, *groups.sharded):
        votes = torch.stack([most, least])
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=group)
        most, least = votes.unbind()
    for name, any_has, all_have in zip(_CORES, most.tolist(), (-least).tolist(), strict=True):
        if any_has != all_have:
            msg = (
                f"some ranks have amp_plugin's {name} and others do not, and both differ in the last bits; "
                "run `amp-plugin doctor` on every machine, which says what is missing, or set "
                "AMP_PLUGIN_NATIVE=0 on all"
            )
            raise RuntimeError(msg)
