"""Build, check and time everything on a GPU, beside torch, in one process and under five minutes.

Run it as ``python benchmarks/cuda.py``, or ``python -m benchmarks.cuda --sets "1 x 1 GB"``.
Every table names what it compares; a kernel that computes something wrong stops the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

# A script's own folder comes first in sys.path, and there this file would be the package `cuda`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from amp_plugin.kernels.cuda.register import cuda_core  # noqa: E402
from benchmarks.cuda_gradients import SETS, kernels, optimizer_step, unscale_check_clip  # noqa: E402
from benchmarks.cuda_training import MODELS, training_step  # noqa: E402

CONSOLE = Console(width=150)


def show(title: str, rows: list[dict[str, str]]) -> None:
    """Print rows as a table as soon as they are there."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in {"set", "variant", "model"} else "right")
    for row in rows:
        table.add_row(*row.values())
    CONSOLE.print(table)


def build() -> None:
    """Compile for this GPU, or say why not and stop."""
    begin = time.perf_counter()
    core = cuda_core()
    if not core.loaded:
        sys.exit(f"the CUDA kernels cannot run here: {core.reason}")
    from amp_plugin.kernels.cuda.compile import build_ahead, nvrtc_version  # noqa: PLC0415 - needs cuda-core

    major, minor = torch.cuda.get_device_capability()
    cubins = build_ahead([f"sm_{major}{minor}"])
    date = datetime.now(timezone.utc).date().isoformat()
    machine = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    versions = f"torch {torch.__version__}, NVRTC {nvrtc_version()}, Python {sys.version.split()[0]}"
    seconds = time.perf_counter() - begin
    CONSOLE.print(f"{machine}, {versions}, {date}; {cubins} kernels in {seconds:.1f} s")


def main() -> None:
    """Run the sections that were asked for."""
    sections = ["kernels", "clip", "step", "train"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS), help="gradient sets")
    parser.add_argument("--sections", nargs="*", choices=sections, default=sections, help="what to time")
    chosen = parser.parse_args()
    build()
    if "kernels" in chosen.sections:
        show("Kernels: time, bandwidth as a share of copy_", [kernels(name) for name in chosen.sets])
    if "clip" in chosen.sections:
        show("Unscale + check + clip", [row for name in chosen.sets for row in unscale_check_clip(name)])
    if "step" in chosen.sections:
        show("Optimizer step with clipping", [row for name in chosen.sets for row in optimizer_step(name)])
    if "train" in chosen.sections:
        rows = [training_step(name, k) for name in MODELS for k in (1, 8)]
        show("GPT training step, fp16, k micro-batches", rows)


if __name__ == "__main__":
    main()
