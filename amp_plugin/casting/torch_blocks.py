"""Regions that are blocks of torch's own, where our kernels cannot serve: the fallback, and exports."""

from __future__ import annotations

import sys
import threading

import torch


class _OpenBlocks(threading.local):
    def __init__(self) -> None:
        self.blocks: list[tuple[torch.autocast, torch.autocast]] = []  # our region, torch's block


_OPEN = _OpenBlocks()


def has_block() -> bool:
    """Say whether a region of ours is open as a block of torch's in this thread."""
    return bool(_OPEN.blocks)


def enter_block(region: torch.autocast) -> None:
    """Open a region as a block of torch's own, in this thread."""
    block = torch.autocast(region.device, region.fast_dtype, region._enabled, cache_enabled=False)
    block.__enter__()  # type: ignore[no-untyped-call]
    _OPEN.blocks.append((region, block))


def exit_block(region: torch.autocast) -> None:
    """Close the innermost block of torch's own that `region` opened in this thread.

    Raises:
        RuntimeError: it has none open here.
    """
    for index in reversed(range(len(_OPEN.blocks))):
        if _OPEN.blocks[index][0] is region:
            _OPEN.blocks.pop(index)[1].__exit__(None, None, None)
            return
    msg = "autocast: exit without enter; this region is not open in this thread"
    raise RuntimeError(msg)


def blocks_are_recorded() -> bool:
    """Say whether torch.export or ``make_fx(pre_dispatch=True)`` records this thread's autocast blocks.

    Other modes that see torch's functions, as of ``torch.set_default_device``, do not.
    """
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and any(
        isinstance(mode, tracing.PreDispatchTorchFunctionMode)
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )
