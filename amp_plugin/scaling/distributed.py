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
from amp_plugin.scaling.spread import Spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


class Part(NamedTuple):
    """What one kernel call found; norm and found_inf as the ops return them."""

    norm: Tensor
    found_inf: Tensor
    flags: Tensor
    positions: Sequence[int] | None
    spread: Spread | None


def combine(
    parts: Sequence[Part],
    norm_type: float,
    device: torch.device,
    groups: Groups,
    spreads: Sequence[Spread],
    earlier: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Combine the parts of all devices and ranks.

    Args:
        parts: This rank's results; may be empty.
        norm_type: The p of the norms.
        device: Where the results go.
        groups: The groups the scaler was given.
        spreads: All ways in which the optimizer's *parameters* are spread, the same list on every
            rank, so that a rank without gradients takes part too.
        earlier: Overflow flags of this rank from before the parts were measured.

    Returns:
        Norm and found_inf over all ranks, float32, 0-dim, on ``device``.
    """
    if len(parts) == 1 and not (groups or spreads or earlier):
        part = parts[0]
        return part.norm.to(device, non_blocking=True), part.found_inf.to(device, non_blocking=True)
    by_spread: dict[Spread | None, list[Part]] = {**{spread: [] for spread in spreads}, None: []}
    for part in parts:
        by_spread.setdefault(part.spread, []).append(part)
    flag = _local_flag([*(part.found_inf for part in parts), *earlier], device)
    powers = []
    for spread, members in by_spread.items():  # the flag goes through every collective: all ranks learn of it
        pair = torch.stack([_local_power(members, norm_type, device), flag])
        pair = _over_mesh(pair, norm_type, spread) if spread else _over_groups(pair, norm_type, groups)
        power, flag = pair.unbind()
        powers.append(power)
    return _norm_of(torch.stack(powers), norm_type).float(), (flag > 0).float()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _local_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    if not flags:
        return torch.zeros((), dtype=_wide(device), device=device)
    return torch.stack([flag.to(device, non_blocking=True) for flag in flags]).max().to(_wide(device))


def _local_power(parts: Sequence[Part], norm_type: float, device: torch.device) -> Tensor:
    """This rank's norm to its power, 0-dim; what is neutral if there are no parts."""
    if not parts:
        neutral = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), neutral, dtype=_wide(device), device=device)
    norms = torch.stack([part.norm.to(device, non_blocking=True) for part in parts]).to(_wide(device))
    return _add_up(norms if _has_no_power(norm_type) else norms.pow(norm_type), norm_type)


def _has_no_power(norm_type: float) -> bool:
    return norm_type == 0 or math.isinf(norm_type)


def _add_up(powers: Tensor, norm_type: float) -> Tensor:
    if norm_type == math.inf:
        return powers.max()
    return powers.min() if norm_type == -math.inf else powers.sum()


def _norm_of(powers: Tensor, norm_type: float) -> Tensor:
    total = _add_up(powers, norm_type)
    return total if _has_no_power(norm_type) else total.pow(1.0 / norm_type)


def _all_reduce(pair: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """Join power and flag over one group: one collective."""
    sign = torch.ones_like(pair)
    if norm_type == -math.inf:  # -max(-x) is min(x)
        sign[0] = -1.0
    op = torch.distributed.ReduceOp.MAX if math.isinf(norm_type) else torch.distributed.ReduceOp.SUM
    pair = pair * sign
    torch.distributed.all_reduce(pair, op, group=group)
    return pair * sign


def _over_mesh(pair: Tensor, norm_type: float, spread: Spread) -> Tensor:
    for dim, sharded in enumerate(spread.sharded):
        if not sharded and not math.isinf(norm_type):
            pair = torch.stack([pair[0] / spread.mesh.size(dim), pair[1]])
        pair = _all_reduce(pair, norm_type, spread.mesh.get_group(dim))
    return pair


def _over_groups(pair: Tensor, norm_type: float, groups: Groups) -> Tensor:
    for group in groups.sharded:
        pair = _all_reduce(pair, norm_type, group)
    for group in groups.agree:
        flag = pair[1].clone()
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        pair = torch.stack([pair[0], flag])
    return pair


def agree_on_core(groups: Groups, device: torch.device) -> None:
    """Check that all ranks have the native core, or none.

    Both compute the same to the last few bits only; replicated parameters would drift apart.

    Raises:
        RuntimeError: The ranks differ.
    """
    if not groups:
        return
    loaded = float(native_core().loaded)
    votes = torch.tensor([loaded, -loaded], device=device)
    for group in (*groups.agree, *groups.sharded):
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group=group)
    if votes[0] != -votes[1]:
        msg = (
            "some ranks have amp_plugin's native core and others do not, and both differ in the last bits; "
            "run `amp-plugin build` on every machine, or set AMP_PLUGIN_NATIVE=0 on all"
        )
        raise RuntimeError(msg)
