"""Measure the peak memory that a forward and backward pass and a clipped step allocate."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.autocast import uses_of_one_weight
from benchmarks.clocks import Call, Sample
from benchmarks.forward_backward import MODELS, variants
from benchmarks.gradient_path import Gradients, shapes_of
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's log


class Memory(Section):
    """Count the bytes that torch's allocator allocates, with torch's profiler."""

    key = "memory"
    timing = "allocations counted by torch's profiler"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Yield comparisons for forward and backward passes, for clipping, and for clipped steps."""
        for name, make in list(MODELS.items())[: setting.sized(len(MODELS), 1)]:
            calls = variants(setting, make(setting))
            yield _comparison(
                name, "Forward + backward: peak memory in addition to model and batches", calls, setting
            )
        for name, calls in uses_of_one_weight(setting).items():
            gates = (Gate(limit=1.02),) if setting.device == "cpu" else ()
            table = "A region that uses one weight 200 times: peak memory in addition to the weight"
            yield replace(_comparison(name, table, calls, setting), gates=gates)
        bench = Gradients(shapes_of("ResNet-50", setting), setting.device)
        bench.step_theirs()  # create the optimizer state before memory is measured
        bench.step_ours()
        calls = {OURS: partial(clip_scaled, bench), "torch": bench.clip_theirs}
        yield _comparison(
            "clip, in place",
            "ResNet-50's gradients: peak memory in addition to the gradients",
            calls,
            setting,
        )
        bench.scaled_again()
        calls = {OURS: bench.step_ours, "torch": bench.step_theirs}
        yield _comparison(
            "clip + fused AdamW",
            "ResNet-50's gradients: peak memory in addition to the gradients",
            calls,
            setting,
        )


def clip_scaled(bench: Gradients) -> None:
    """Unscale and clip gradients that the scaler assumes are still scaled."""
    bench.scaled_again()
    bench.clip_ours()


def _comparison(name: str, table: str, calls: dict[str, Call], setting: Setting) -> Comparison:
    return Comparison(
        name=name,
        table=table,
        samples={label: peak(call, setting.device) for label, call in calls.items()},
        unit="bytes",
        rounds=1,
    )


def peak(call: Call, device: str) -> Sample:
    """Return a function that measures the peak memory of a call, minus the memory allocated before it."""

    def on_cuda() -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def on_cpu() -> float:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        changes = sorted(
            (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
        )
        return max(accumulate((bytes_ for _, bytes_ in changes), initial=0))

    return on_cuda if device == "cuda" else on_cpu


SECTIONS = (Memory(),)
