"""All that needs a GPU, in one command with one summary: ``make test-gpu``.

Runs in the Python it is started with, on whatever torch that has; leaves out, and names, what needs a package that
is not installed.

python -m tests.on_gpu                    every step
python -m tests.on_gpu kernels adapters   some, by the names in the summary
python -m tests.on_gpu --limit 600        a step is ended after so many seconds
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/scaling", "tests/casting", "tests/host_device")
UNDER_THE_SANITIZER = "tests/kernels/test_cuda_kernels.py"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "tests.gpu_files")
ALL_FILES = "--continue-on-collection-errors"  # one that cannot be read does not keep the others from running
CONSOLE = Console(width=120)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: For the summary, and to ask for it.
        command: What is run, in the folder of the project.
        needs: Packages or programs without which it is left out.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step: ``"passed"``, ``"FAILED"`` and why, or why it was left out."""

    step: Step
    verdict: str
    seconds: float = 0.0


def steps() -> list[Step]:
    """Return what there is to run, in order."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    benchmarks = (sys.executable, "-m", "benchmarks", "cuda")
    plots = ("matplotlib", "lightning", "accelerate")
    return [
        Step(name="kernels", command=(*PYTEST, ALL_FILES, *TESTS), needs=("pytest",)),
        Step(
            name="adapters",
            command=(*PYTEST, ALL_FILES, "tests/adapters"),
            needs=("pytest", "hypothesis", "lightning", "accelerate"),
        ),
        Step(
            name="recipes",
            command=(*PYTEST, ALL_FILES, "tests/recipes"),
            needs=("pytest", "omegaconf", "sklearn", "matplotlib", "tensorboard", "lightning", "accelerate"),
        ),
        *(
            Step(
                name=tool,
                command=(
                    *(sanitizer, "--tool", tool, "--error-exitcode", "9"),
                    *(*PYTEST, "-x", UNDER_THE_SANITIZER, "-k", "grid or many or bad"),
                ),
                needs=("pytest", sanitizer),
            )
            for tool in ("memcheck", "racecheck")
        ),
        Step(name="benchmarks", command=benchmarks, needs=plots),
        Step(name="promises", command=(*benchmarks, "--check"), needs=plots),
    ]


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine lacks."""
    return [
        need
        for need in step.needs
        if not (Path(need).exists() if "/" in need else importlib.util.find_spec(need) is not None)
    ]


def run(step: Step, limit: float | None = None) -> Outcome:
    """Run a step, its output on the terminal; ``limit`` is the seconds after which it is ended."""
    if lacking := missing(step):
        return Outcome(step=step, verdict=f"left out: {', '.join(lacking)} is not installed")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "tests.xml")
        recorded = ("--junitxml", str(record)) if "pytest" in step.command else ()
        try:
            done = subprocess.run((*step.command, *recorded), cwd=ROOT, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            verdict = f"FAILED, ended after {limit:.0f} s"
        else:
            verdict = verdict_of(done.returncode, record if recorded else None)
    return Outcome(step=step, verdict=verdict, seconds=time.perf_counter() - begin)


def verdict_of(status: int, record: Path | None) -> str:
    """Return a step's verdict.

    Args:
        status: Its exit status.
        record: What pytest wrote of it in JUnit's format, if it ran tests. Without one that ran, it has failed.
    """
    failed = f"FAILED, exit status {status}"
    if record is None or not record.exists():
        return failed if status or record is not None else "passed"
    suites = ET.parse(record).getroot().iter("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    counts = [{name: int(suite.get(name, 0)) for name in names} for suite in suites]
    tests, failures, errors, skipped = (sum(count[name] for count in counts) for name in names)
    passed = tests - failures - errors - skipped
    told = f"{passed} passed, {failures + errors} failed, {skipped} skipped"
    if status:
        return f"{failed}: {told}"
    return f"passed: {told}" if passed else f"FAILED, nothing ran: {told}"


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Return the table that ends a run."""
    table = Table(title="On this GPU", title_justify="left")
    for column in ("", "", "s"):
        table.add_column(column)
    for outcome in outcomes:
        table.add_row(outcome.step.name, outcome.verdict, f"{outcome.seconds:.0f}" if outcome.seconds else "")
    return table


def asked_for(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="Run all that needs a GPU.")
    names = [step.name for step in steps()]
    parser.add_argument("only", nargs="*", metavar="step", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--limit", type=float, help="seconds after which a step is ended; none by default")
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.only if name not in names]:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(names)}")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if one failed, 2 if there is no GPU."""
    asked = asked_for(words)
    import torch

    if not torch.cuda.is_available():
        CONSOLE.print("torch sees no CUDA device; make test-host-device runs these tests without one")
        return 2
    outcomes = []
    for step in steps():
        if not asked.only or step.name in asked.only:
            CONSOLE.print(
                f"\n{step.name}: {' '.join(step.command)}", soft_wrap=True, markup=False, style="bold"
            )
            outcomes.append(run(step, asked.limit))
            CONSOLE.print(f"{step.name}: {outcomes[-1].verdict}", markup=False, style="bold")
    CONSOLE.print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    CONSOLE.print(summary(outcomes))
    return int(any(outcome.verdict.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
