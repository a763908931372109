"""All that needs a GPU, in one command with one summary: ``make test-gpu``.

Runs in the Python it is started with, on whatever torch that has; leaves out, and names, what needs a package that
is not installed. What is promised comes first. Each step has a time limit and a process of its own; its output
goes to a log, and its outcome is kept when it ends, so nothing is lost if the run is cut off.

    python -m tests.on_gpu                        every step
    python -m tests.on_gpu first-ten-minutes      what no machine without a GPU can show; most for the time
    python -m tests.on_gpu doctor bandwidth       some, by the names in the summary; outcomes of others are kept
    python -m tests.on_gpu --rest --within 540    those without an outcome yet, as many as fit in 540 s
    python -m tests.on_gpu --list                 the steps, and how long each may take
    python -m tests.on_gpu --results FOLDER       for outcomes.json, summary.txt, on-gpu.log, and the figures

Where the work tree is replaced between calls, keep the folder of results outside of it, and copy it out: what --rest
and the promises go by is there, and nowhere else.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.catalogue import CPU
from tests.first_ten_minutes import PARTS
from tests.gpu_step import ROOT, Outcome, Step, load, run, save

KERNELS = ("tests/kernels", "tests/host_device", "tests/benchmarks")
FIRST_LIMITS = {"load": 300.0, "streams": 120.0, "bandwidth": 120.0, "sweep": 240.0}  # others take a minute
FIGURES = ROOT / "benchmarks" / "results"
PROMISED = ("bandwidth", "launches", "clipping", "steps", "kernels", "tensors")  # the sections of most weight
LATER = tuple(key for key in CPU if key not in PROMISED and key != "host")  # host needs no GPU
FRAMEWORKS = {"lightning": ("lightning",), "accelerate": ("accelerate",)}
FIRST = "first-ten-minutes"
FIRST_STEPS = (*(f"first-{part}" for part in PARTS), "memcheck", "initcheck")
SHOWN = 1  # failed test of a step that the summary names
WIDTH = 110
CONSOLE = Console(width=WIDTH)


def pytest_over(*where: str, marked: str = "gpu and not slow") -> tuple[str, ...]:
    """Return pytest's command; a test that is too slow fails alone, by a signal, and the others go on."""
    patient = ("--timeout", "150", "--timeout-method", "signal")
    return (
        *(sys.executable, "-m", "pytest", "-v", "--tb", "short", "-m", marked, "-p", "tests.gpu_files"),
        *("--continue-on-collection-errors", "-p", "no:cacheprovider"),
        *(patient if importlib.util.find_spec("pytest_timeout") else ()),
        *where,
    )


def section(key: str) -> Step:
    """Return the step that measures a section of the benchmarks, for the figures alone."""
    command = (sys.executable, "-m", "benchmarks", "cuda", "--only", key, "--keep")
    return Step(name=key, command=command, needs=FRAMEWORKS.get(key, ()), limit=200.0)


def first(part: str) -> Step:
    """Return the step of a part of the first ten minutes."""
    command = (sys.executable, "-m", "tests.first_ten_minutes", part, "--figures", "{results}")
    return Step(name=f"first-{part}", command=command, limit=FIRST_LIMITS.get(part, 60.0))


def checked(tool: str) -> Step:
    """Return the step that runs our kernels, and nearly nothing else, under a tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Each tensor an allocation of its own: torch's cache would hide an access behind the end of one.
    apart = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),) if tool == "memcheck" else ()
    program = (sys.executable, "-m", "tests.first_ten_minutes", "ops")
    command = (sanitizer, "--tool", tool, "--error-exitcode", "9", *program)
    return Step(name=tool, command=command, needs=(sanitizer,), limit=280.0, environment=apart)


def steps() -> list[Step]:
    """Return what there is to run, what matters most first."""
    doctor = (sys.executable, "-m", "amp_plugin", "doctor")
    promises = (sys.executable, "-m", "benchmarks", "cuda", "--promises")
    adapters = ("pytest", "hypothesis", "lightning", "accelerate")
    recipes = ("pytest", "omegaconf", "sklearn", "matplotlib", "tensorboard", "lightning", "accelerate")
    return [
        *(first(part) for part in PARTS),
        *map(checked, ("memcheck", "initcheck")),
        Step(
            name="doctor", command=doctor, needs=("typer",)
        ),  # compiles the core, unless that was done before
        Step(name="kernel-tests", command=pytest_over(*KERNELS), needs=("pytest",)),
        *map(section, PROMISED),
        Step(name="promises", command=promises, limit=60.0),
        Step(name="scaling-tests", command=pytest_over("tests/scaling"), needs=("pytest",)),
        Step(name="casting-tests", command=pytest_over("tests/casting"), needs=("pytest",)),
        *map(checked, ("racecheck", "synccheck")),
        Step(name="slow-tests", command=pytest_over(*KERNELS, marked="gpu and slow"), needs=("pytest",)),
        Step(name="adapter-tests", command=pytest_over("tests/adapters"), needs=adapters),
        Step(name="recipe-tests", command=pytest_over("tests/recipes"), needs=recipes),
        *map(section, LATER),
    ]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the lines that end a run; short, since of a long output often only the end is shown."""
    lines = []
    for outcome in outcomes:
        seconds = f"{outcome.seconds:.0f} s" if outcome.seconds else ""
        named = [f"    {failure}" for failure in outcome.failures[:SHOWN]]
        more = len(outcome.failures) - SHOWN
        named += [f"    and others; outcomes.json names {len(outcome.failures)}"] if more > 0 else []
        lines += [f"{outcome.name:<15} {seconds:>5}  {outcome.verdict}", *named]
    return "\n".join(line[:WIDTH] for line in lines)


def asked_for(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="Run all that needs a GPU.")
    names = [step.name for step in steps()]
    parser.add_argument(
        "only", nargs="*", metavar="step", help=f"of {FIRST}, {', '.join(names)}; all by default"
    )
    parser.add_argument("--rest", action="store_true", help="only what has no outcome in the results yet")
    parser.add_argument("--list", action="store_true", help="show the steps and their limits, run none")
    parser.add_argument(
        "--limit", type=float, help="seconds after which a step is ended, if fewer than its own"
    )
    parser.add_argument("--within", type=float, help="seconds for all; what does not fit is left for --rest")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(tempfile.gettempdir()) / "amp-plugin-on-gpu",
        help="folder for what is kept, outside of the work tree, which may be replaced; copy it out at the end",
    )
    asked = parser.parse_args(words)
    if FIRST in asked.only:
        asked.only = [name for name in names if name in {*asked.only, *FIRST_STEPS}]
    if unknown := [name for name in asked.only if name not in names]:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(names)}")
    return asked


class Results:
    """The folder of outcomes, the log and the figures.

    Args:
        folder: Made if it is not there.
        machine: First line of the summary.
        afresh: Whether outcomes and log of earlier runs are dropped.
    """

    def __init__(self, folder: Path, machine: str, *, afresh: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._machine = folder, machine
        self._file = folder / "outcomes.json"
        self.log = folder / "on-gpu.log"
        if afresh:
            self._file.unlink(missing_ok=True)
            self.log.unlink(missing_ok=True)
        self.outcomes = load(self._file)
        self._give_back_figures()
        self._begin = time.time()

    def _give_back_figures(self) -> None:
        """Let a work tree that was replaced have the figures of earlier calls, which promises go by."""
        for figures in self._folder.glob("nvidia-*.json"):
            if not (FIGURES / figures.name).exists():
                FIGURES.mkdir(parents=True, exist_ok=True)
                shutil.copy2(figures, FIGURES)

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome in place of the step's last one, and all figures that have been made since."""
        order = [step.name for step in steps()]
        others = [kept for kept in self.outcomes if kept.name != outcome.name]
        self.outcomes = sorted(
            [*others, outcome], key=lambda kept: order.index(kept.name) if kept.name in order else -1
        )
        save(self.outcomes, self._file)
        for figures in FIGURES.glob("*.json"):
            if figures.stat().st_mtime >= self._begin:
                shutil.copy2(figures, self._folder)
        (self._folder / "summary.txt").write_text(f"{self.summary}\n")

    @property
    def summary(self) -> str:
        """The machine, then all outcomes there are."""
        return f"{self._machine}\n{summary(self.outcomes)}"


def run_steps(chosen: Sequence[Step], results: Results, limit: float | None, within: float | None) -> None:
    """Run steps one after the other; what does not fit into ``within`` seconds has no outcome."""
    begin = time.perf_counter()
    for step in chosen:
        left = float("inf") if within is None else within - (time.perf_counter() - begin)
        if left < min(step.limit, 30.0):
            CONSOLE.print(
                f"{step.name}: not begun, {max(left, 0):.0f} s are left; --rest runs it", markup=False
            )
            continue
        outcome = run(step, results.log, min(left, step.limit if limit is None else limit))
        results.add(outcome)
        CONSOLE.print(
            f"{step.name}: {outcome.verdict} ({outcome.seconds:.0f} s)", markup=False, soft_wrap=True
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if one failed, 2 if there is no GPU."""
    asked = asked_for(words)
    if asked.list:
        for step in steps():
            CONSOLE.print(f"{step.name:<16} at most {step.limit:.0f} s", markup=False)
        return 0
    import torch

    if not torch.cuda.is_available():
        CONSOLE.print("torch sees no CUDA device; make test-host-device runs these tests without one")
        return 2
    python = sys.version.split()[0]
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {python}"
    results = Results(asked.results, machine, afresh=not (asked.rest or asked.only))
    done = {outcome.name for outcome in results.outcomes if not outcome.cut_off} if asked.rest else set()
    chosen = [step for step in steps() if not asked.only or step.name in asked.only]
    run_steps([step for step in chosen if step.name not in done], results, asked.limit, asked.within)
    CONSOLE.print(f"\n{results.summary}", markup=False, soft_wrap=True)
    return int(any(outcome.failed for outcome in results.outcomes))


if __name__ == "__main__":
    sys.exit(main())
