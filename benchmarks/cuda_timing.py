"""Time variants side by side on a GPU: round-robin, from a cold cache, median of all rounds."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 512 * 2**20  # several times the L2 of any GPU


def side_by_side(
    variants: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], rounds: int = 15
) -> dict[str, float]:
    """Return milliseconds per call of each variant.

    The time is from before the first to after the last launch of a call, on an idle device whose
    L2 was flushed, so host time counts where it is what one waits for.

    Args:
        variants: Name -> (prepare, call); only the call is timed.
        rounds: How often each variant runs, in turns, after two rounds to warm up.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, (prepare, call) in variants.items():
            prepare()
            flush.fill_(turn)
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(taken) for name, taken in times.items()}


def device_work(call: Callable[[], object]) -> tuple[int, int]:
    """Count what one call launches (kernels, copies, memsets) and how often it waits for the device."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    launches = sum(event.device_type == on_device for event in profile.events())
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode("default")
    return launches, sum("synchroniz" in str(one.message) for one in seen)
