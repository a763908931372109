"""The autocast state of a thread, as values that another thread or process can open again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_plugin.casting.autocast_kernels import DEVICE_NUMBERS, KERNELS
from amp_plugin.casting.region import autocast
from amp_plugin.casting.rule_sets import rules_of
from amp_plugin.casting.rule_tables import TABLES
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.torch_blocks import has_block


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionState:
    """What a region of one device is opened with; can be pickled and sent to another process.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: the lower precision.
        enabled: False for a region in which autocast is off.
        cache_enabled: keep the casts of weights inside the region.
        rules: None for the default rules.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool = True
    rules: OpRules | None = None

    def region(self) -> torch.autocast:
        """Make a region with this state."""
        if self.rules is None:
            return autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)
        return autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled, rules=self.rules)


def current_state() -> tuple[RegionState, ...]:
    """Return the autocast state of this thread, one entry per device where it is on or in a region."""
    KERNELS.install()
    opened = _open_regions()
    on = [device for device in TABLES if torch.is_autocast_enabled(device) or device in opened]
    return tuple(
        RegionState(
            device_type=device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=opened.get(device, (None, torch.is_autocast_cache_enabled()))[1],
            rules=opened.get(device, (None, True))[0],
        )
        for device in on
    )


def _open_regions() -> dict[str, tuple[OpRules | None, bool]]:
    """Return the rules and the cache flag of this thread's innermost region of each device."""
    names = {number: name for name, number in DEVICE_NUMBERS.items()}
    regions = KERNELS.innermost_regions()
    return {names[device]: (rules_of(number), cached) for device, number, cached in regions}


def has_region() -> bool:
    """Say whether this thread has a region of ours open."""
    return has_block() or bool(KERNELS.innermost_regions())
