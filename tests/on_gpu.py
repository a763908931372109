"""All checks that need a GPU, in one command with one summary: ``make test-gpu``.

Each step is a command with a time limit. It runs in a process of its own, with the same Python as this one.
The ops are checked first. Then everything that is timed runs, one step at a time. Then tests, sanitizers and
recipes run side by side. A step is left out, and named, if a package that it needs is missing. Output,
outcomes and figures are saved as they arrive.

    python -m tests.on_gpu                        every step
    python -m tests.on_gpu first-ten-minutes      the steps that matter most, in at most eight minutes
    python -m tests.on_gpu doctor bandwidth       some steps, by their names in the summary; keep the other outcomes
    python -m tests.on_gpu --rest --within 540    steps without an outcome yet, as many as fit in 540 s
    python -m tests.on_gpu --results FOLDER       for gpu.json, and a log of each step
    python -m tests.on_gpu --jobs 8               that many steps side by side, if nothing is timed

If the work tree is replaced between calls, keep the results folder outside of it, and copy it from there:
--rest and the promised limits need its contents. ``python -m benchmarks.published gpu.json`` makes the
tables.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.catalogue import NEEDS
from recipes.catalogue import NAMES as RECIPES

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "results"
KERNELS = ("tests/kernels", "tests/host_device", "tests/benchmarks")
# Sections that take more than a minute.
LONG = ("training", "lightning", "accelerate", "compiled", "first_use")
# The sections, the most important first. "host" needs no GPU.
PROMISED = ("bandwidth", "launches", "clipping", "steps", "forms", "training", "kernels", "tensors")
LATER = (
    *("lightning", "accelerate", "memory", "diagnosis", "weights", "ops", "models", "depth"),
    *("compiled", "first_use"),
)
FIRST = "first-ten-minutes"
FIRST_TESTS = "tests/kernels/test_first_ten_minutes.py"
PARTS = ("ops", "graphs", "streams", "addresses", "bandwidth", "sweep")
NOT_FIRST = ("first-bandwidth", "first-sweep", "slow-tests", "recipe-tests", "doctor")
FIRST_WITHIN = 480.0  # time limit of ``first-ten-minutes`` in seconds
SEVERAL_DEVICES = ("threads",)  # recipes that need several devices
OF_RANKS = ("ddp", "fsdp2", "fsdp2_exact_bf16")  # recipes with several processes; here each runs in one
RECIPE_NEEDS = {"below_16_bits": ("torchao",)}
SANITIZERS = ("memcheck", "initcheck", "racecheck", "synccheck")
# The last lines of pytest and compute-sanitizer, which say how a step ended.
SUMMARY = re.compile(
    r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*|^=* ?(?:\d+ \w+,? )+in [\d.]+s.*", re.MULTILINE
)
LEAST = 30.0  # a long step is not started with less than so many seconds left
# On the host device, sections use their smallest sizes, and all steps get more time.
REHEARSAL = "host_device" in os.environ.get("LD_PRELOAD", "")
PATIENCE = 30.0 if REHEARSAL else 1.0
# What sections need and the host device does not have.
LACKS = {"launches": "a profiler of launches", "diagnosis": "a second owner of a storage"}
KEPT = "host-memory-*.json" if REHEARSAL else "nvidia-*.json"  # file names of figures
# Tests of NVRTC, which the host device replaces.
NEED_NVRTC = "test_cuda_[cp]*.py", "test_what_a_gpu_executes.py"
OF_COMPILERS = tuple(f"--ignore-glob=tests/kernels/{name}" for name in NEED_NVRTC) if REHEARSAL else ()
WIDTH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command, run in the project's folder."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # packages or programs that it needs; otherwise it is left out
    limit: float = 150.0  # time limit in seconds
    alone: bool = True  # whether it must run alone
    environment: tuple[tuple[str, str], ...] = ()  # variables added to this process's environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a step."""

    name: str
    verdict: str  # "passed", "FAILED" and why, why it was left out, or that it ran out of time
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:<15} {self.seconds:>4.0f} s  {self.verdict}"[:WIDTH]


def pytest_over(*where: str, marked: str = "gpu and not slow", whole: bool = False) -> tuple[str, ...]:
    """Return pytest's command. A signal ends a test that is too slow; the other tests continue.

    With ``whole``, the step is a single test, and the step's limit is the test's limit.
    """
    patient = ("--timeout", "100", "--timeout-method", "signal")
    # That machine may have newer packages than the tests are usually run with.
    newer = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "SyntaxWarning")
    return (
        *(sys.executable, "-m", "pytest", "-v", "--tb", "short", "-m", marked),
        # pytest-benchmark warns if pytest-xdist is installed, and warnings are errors here.
        *("--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:benchmark"),
        *(word for category in newer for word in ("-W", f"default::{category}")),
        *(patient if find_spec("pytest_timeout") and not whole else ()),
        *where,
    )


def first(part: str) -> tuple[str, ...]:
    """Return the command for a part of the first ten minutes, which prints its measurements."""
    return (*pytest_over(f"{FIRST_TESTS}::test_{part}", marked="gpu", whole=True), "-s")


def run_tests(
    name: str, *where: str, needs: tuple[str, ...] = (), marked: str = "gpu and not slow", processes: int = 1
) -> Step:
    """Return the step that runs tests, in several processes if pytest-xdist is installed."""
    divided = ("-n", str(processes), "--dist", "worksteal") if processes > 1 and find_spec("xdist") else ()
    command = (*pytest_over(*where, marked=marked), *divided)
    return Step(name=name, command=command, needs=("pytest", *needs), limit=110.0, alone=False)


def part(name: str) -> Step:
    """Return the step of a part of the first ten minutes."""
    # These run alone: free memory is that of the whole card, and bandwidth is shared.
    alone = name not in {"streams", "addresses"}
    told = (("ALONE_ON_THE_GPU", "1"),) if alone else ()
    limit = 240.0 if name == "sweep" else 60.0
    return Step(
        name=f"first-{name}",
        command=first(name),
        needs=("pytest",),
        limit=limit,
        alone=alone,
        environment=told,
    )


def section(key: str) -> Step:
    """Return the step that measures one benchmark section and saves only the figures."""
    tiny = ("--tiny",) if REHEARSAL else ()
    command = (sys.executable, "-m", "benchmarks", "cuda", "--only", key, "--keep", *tiny)
    needs = (*NEEDS.get(key, ()), *((LACKS[key],) if REHEARSAL and key in LACKS else ()))
    return Step(name=key, command=command, needs=needs, limit=120.0 if key in LONG else 60.0)


def recipe(name: str) -> Step:
    """Return the step that runs a whole recipe in fp16."""
    one_process = ("processes=1",) if name in OF_RANKS else ()
    command = (sys.executable, "-m", "recipes", "run", name, "device=cuda", "precision=fp16", *one_process)
    frameworks = (framework for framework in ("lightning", "accelerate") if name.endswith(f"_{framework}"))
    needs = ("omegaconf", *frameworks, *RECIPE_NEEDS.get(name, ()))
    return Step(name=f"recipe-{name}", command=command, needs=needs, limit=90.0, alone=False)


def checked(tool: str) -> Step:
    """Return the step that runs our kernels, and little else, under a tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Give each tensor its own allocation: torch's cache would hide an access past the end of a tensor.
    apart = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),) if tool == "memcheck" else ()
    command = (sanitizer, "--tool", tool, "--error-exitcode", "9", *first("ops"))
    return Step(name=tool, command=command, needs=("pytest", sanitizer), alone=False, environment=apart)


def steps() -> list[Step]:
    """Return all steps: first those that run alone, then the others, each with the most important first."""
    adapters = ("hypothesis", "lightning", "accelerate")
    recipes = ("omegaconf", "sklearn", "matplotlib", "tensorboard", "lightning", "accelerate")
    promises = (sys.executable, "-m", "benchmarks", "cuda", "--promises")
    parts = {name: part(name) for name in PARTS}
    return [
        *(parts[name] for name in ("ops", "graphs")),
        *map(section, PROMISED),
        Step(name="promises", command=promises, limit=60.0),
        *map(section, LATER),
        *(parts[name] for name in ("bandwidth", "sweep")),
        Step(name="doctor", command=(sys.executable, "-m", "amp_plugin", "doctor"), needs=("typer",)),
        # These run side by side; the longest start first.
        run_tests("kernel-tests", *KERNELS, "--ignore", FIRST_TESTS, *OF_COMPILERS, processes=4),
        run_tests("adapter-tests", "tests/adapters", needs=adapters, processes=3),
        run_tests("scaling-tests", "tests/scaling", processes=3),
        run_tests("casting-tests", "tests/casting", processes=2),
        run_tests("weights-tests", "tests/weights", "tests/numerics", "tests/formats", processes=2),
        *map(checked, SANITIZERS),
        *(parts[name] for name in ("streams", "addresses")),
        *(recipe(name) for name in RECIPES if name not in SEVERAL_DEVICES),
        run_tests("recipe-tests", "tests/recipes", needs=recipes),
        run_tests("slow-tests", *KERNELS, "tests/casting", *OF_COMPILERS, marked="gpu and slow"),
    ]


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine lacks."""
    found = {need: Path(need).exists() if "/" in need else bool(find_spec(need)) for need in step.needs}
    return [need for need, is_there in found.items() if not is_there]


def run(step: Step, log: Path, limit: float) -> Outcome:
    """Run a step for at most ``limit`` seconds. Its output goes to the log immediately."""
    if lacking := missing(step):
        return Outcome(name=step.name, verdict=f"left out: {', '.join(lacking)} is not installed")
    begin, most = time.perf_counter(), min(step.limit * PATIENCE, limit)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        output.write(f"{' '.join(step.command)}\n".encode())
        output.flush()
        start = output.tell()
        status = _status(step, output.fileno(), most)
    said = log.read_bytes()[start:].decode(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    told = (SUMMARY.findall(said) or lines or ["no output"])[-1].strip(" =")
    if status is None:
        verdict = (
            f"{'cut off' if most < step.limit * PATIENCE else 'FAILED, ended'} after {most:.0f} s: {told}"
        )
    elif status or ("pytest" in step.command and " passed" not in told and "SUMMARY" not in told):
        verdict = f"FAILED, exit status {status}: {told}"
    else:
        verdict = f"passed: {told}"
    return Outcome(name=step.name, verdict=verdict, seconds=round(time.perf_counter() - begin, 1))


def _status(step: Step, output: int, most: float) -> int | None:
    """Run a command.

    Return its exit status, or None if it was killed together with everything that it started.
    """
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)},
    )
    try:
        return process.wait(most)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def copy_newer(source: Path, target: Path) -> None:
    """Copy figures to a folder that lacks them or has older ones."""
    target.mkdir(parents=True, exist_ok=True)
    for figures in source.glob(KEPT):
        other = target / figures.name
        if not other.exists() or other.stat().st_mtime < figures.stat().st_mtime:
            shutil.copy2(figures, other)


class Results:
    """The folder of results: ``gpu.json`` and the logs. It is updated after each step."""

    def __init__(self, folder: Path, device: str, torch: str) -> None:
        self.folder, self.device, self.torch = folder, device, torch
        self.lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.outcomes = {data["name"]: Outcome(**data) for data in kept.get("parts", [])}
        copy_newer(folder, FIGURES)

    @property
    def file(self) -> Path:
        """Return the file that ``benchmarks.published`` reads."""
        return self.folder / "gpu.json"

    def forget(self) -> None:
        """Empty the folder."""
        self.outcomes.clear()
        self.file.unlink(missing_ok=True)

    def add(self, outcome: Outcome) -> None:
        """Print an outcome, and save it together with all figures so far."""
        with self.lock:
            print(outcome, flush=True)
            self.outcomes[outcome.name] = outcome
            copy_newer(FIGURES, self.folder)
            measured = [json.loads(file.read_text()) for file in self.folder.glob(KEPT)]
            here = (
                data for data in measured if (data["machine"], data["torch"]) == (self.device, self.torch)
            )
            figures = next(here, {"machine": self.device, "torch": self.torch, "sections": {}})
            parts = [asdict(outcome) for outcome in self.outcomes.values()]
            scratch = self.folder / "gpu.new"
            scratch.write_text(json.dumps({**figures, "parts": parts}, indent=1))
            scratch.replace(self.file)


def run_steps(chosen: Sequence[Step], results: Results, within: float, jobs: int) -> None:
    """Run the steps that must be alone one after another, then the others side by side.

    A step that does not fit into ``within`` seconds has no outcome. The steps that run side by side get the
    longest of their limits together.
    """
    begin = time.perf_counter()
    beside = [step for step in chosen if not step.alone]
    kept_for_them = max((step.limit * PATIENCE for step in beside), default=0.0)

    def one(step: Step, reserve: float) -> None:
        left = within - reserve - (time.perf_counter() - begin)
        if left < min(step.limit, LEAST):
            print(f"{step.name}: not begun, {max(left, 0):.0f} s are left; --rest runs it", flush=True)
        else:
            results.add(run(step, results.folder / "logs" / f"{step.name}.log", left))

    for step in chosen:
        if step.alone:
            one(step, kept_for_them)
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, step, 0.0) for step in beside]:
            future.result()


def asked_for(words: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="Run all that needs a GPU.")
    parser.add_argument("only", nargs="*", metavar="step", choices=[FIRST, *names, []], help="all by default")
    parser.add_argument("--rest", action="store_true", help="only what has no outcome in the results yet")
    parser.add_argument("--within", type=float, help="seconds; --rest does the others")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=cores, help="steps side by side; as many as cores by default"
    )
    results = Path(tempfile.gettempdir()) / "amp-plugin-on-gpu"
    parser.add_argument("--results", type=Path, default=results, help="folder that is kept")
    asked = parser.parse_args(words)
    if FIRST in asked.only:
        asked.only = [name for name in names if name in asked.only or name not in NOT_FIRST]
        asked.within = asked.within or FIRST_WITHIN * PATIENCE
    asked.within = asked.within or float("inf")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps. Return 1 if one failed, 2 if there is no GPU."""
    asked = asked_for(words, [step.name for step in steps()])
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; make test-host-device runs these tests without one")
        return 2
    results = Results(asked.results, torch.cuda.get_device_name(), torch.__version__)
    if not (asked.rest or asked.only):
        results.forget()
    done = {name for name, outcome in results.outcomes.items() if not outcome.verdict.startswith("cut off")}
    chosen = [step for step in steps() if not asked.only or step.name in asked.only]
    run_steps(
        [step for step in chosen if not (asked.rest and step.name in done)], results, asked.within, asked.jobs
    )
    print(f"\n{results.device}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(*results.outcomes.values(), f"what failed stands in {results.folder / 'logs'}", sep="\n")
    verdicts = [outcome.verdict for outcome in results.outcomes.values()]
    return int(any(not verdict.startswith(("passed", "left out")) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
