"""All that needs a GPU, in one command with one summary: ``make test-gpu``.

Runs in the Python it is started with, on whatever torch that has; leaves out, and names, what needs a package that
is not installed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/scaling", "tests/casting", "tests/host_device")
UNDER_THE_SANITIZER = "tests/kernels/test_cuda_kernels.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: For the summary.
        command: What is run, in the folder of the project.
        needs: Packages or programs without which it is left out.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step: ``"passed"``, ``"FAILED"`` or why it was left out."""

    step: Step
    verdict: str
    seconds: float = 0.0


def steps() -> list[Step]:
    """Return what there is to run, in order."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checked = (sys.executable, "-m", "pytest", "-q", "-x", UNDER_THE_SANITIZER, "-k", "grid or many or bad")
    return [
        Step(name="tests of kernels, scaling and casting", command=(*pytest, *TESTS), needs=("pytest",)),
        Step(
            name="tests of the adapters",
            command=(*pytest, "tests/adapters"),
            needs=("pytest", "lightning", "pytorch_lightning", "accelerate", "transformers", "jsonargparse"),
        ),
        *(
            Step(
                name=f"compute-sanitizer, {tool}",
                command=(sanitizer, "--tool", tool, "--error-exitcode", "9", *checked),
                needs=("pytest", sanitizer),
            )
            for tool in ("memcheck", "racecheck")
        ),
        Step(
            name="benchmarks",
            command=(sys.executable, "-m", "benchmarks", "cuda"),
            needs=("matplotlib", "lightning", "accelerate"),
        ),
        Step(
            name="what the benchmarks promise",
            command=(sys.executable, "-m", "benchmarks", "cuda", "--check"),
            needs=("matplotlib", "lightning", "accelerate"),
        ),
    ]


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine lacks."""
    return [
        need
        for need in step.needs
        if not (Path(need).exists() if "/" in need else importlib.util.find_spec(need) is not None)
    ]


def run(step: Step) -> Outcome:
    """Run a step, its output on the terminal."""
    if lacking := missing(step):
        return Outcome(step=step, verdict=f"left out: {', '.join(lacking)} is not installed")
    begin = time.perf_counter()
    code = subprocess.run(step.command, cwd=ROOT, check=False).returncode
    verdict = "passed" if code == 0 else f"FAILED, exit status {code}"
    return Outcome(step=step, verdict=verdict, seconds=time.perf_counter() - begin)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Return the table that ends a run."""
    table = Table(title="On this GPU", title_justify="left")
    for column in ("", "", "s"):
        table.add_column(column)
    for outcome in outcomes:
        table.add_row(outcome.step.name, outcome.verdict, f"{outcome.seconds:.0f}" if outcome.seconds else "")
    return table


def main() -> int:
    """Run all steps; return 1 if one failed, 2 if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        Console().print("torch sees no CUDA device; make test-host-device runs these tests without one")
        return 2
    outcomes = [run(step) for step in steps()]
    console = Console(width=120)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    console.print(summary(outcomes))
    return int(any(outcome.verdict.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
