"""Measure the time to compile the native core, or to load it from the cache, at its first use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.clocks import Sample
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.setting import Section, Setting

LOAD = """
import time
from amp_plugin.kernels.build import require_native
start = time.perf_counter()
require_native("the benchmark")
print(time.perf_counter() - start)
"""


def seconds(**environment: str) -> float:
    """Return how long a new process takes to compile or load the native core after importing torch."""
    answer = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(answer.stdout)


def compiled() -> float:
    """Compile the native core into an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds(AMP_PLUGIN_CACHE_DIR=folder)


class FirstUse(Section):
    """Time the compilation of the native core on all CPU cores, and the loading of the compiled core."""

    key = "first_use"
    timing = "wall time in a fresh process"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Measure how long it takes to load the native core from the cache, and to compile the core.

        A smoke test does not compile the core.
        """
        if not setting.tiny:
            limit = (Gate(limit=40.0, measure="ours", against=OURS),)
            yield _comparison("compiled, with an empty cache", compiled, rounds=3, gates=limit)
        yield _comparison("loaded from the cache", seconds, rounds=setting.rounds(5))


def _comparison(name: str, sample: Sample, *, rounds: int = 1, gates: tuple[Gate, ...] = ()) -> Comparison:
    return Comparison(
        name=name,
        table="First use of the native core, in seconds",
        samples={OURS: sample},
        unit="seconds",
        rounds=rounds,
        warm_up=0,
        gates=gates,
    )


SECTIONS = (FirstUse(),)
