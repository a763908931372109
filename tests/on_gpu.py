"""All that needs a GPU, in one command with one summary: ``make test-gpu``.

Each step is a command with a time limit and a process of its own, in the Python that this one is started with. What is promised
comes first; what needs a package that is not installed is left out and named. Output and outcomes are kept as they come.

    python -m tests.on_gpu                        every step
    python -m tests.on_gpu first-ten-minutes      what no machine without a GPU can show; most for the time
    python -m tests.on_gpu doctor bandwidth       some, by the names in the summary; outcomes of others are kept
    python -m tests.on_gpu --rest --within 540    those without an outcome yet, as many as fit in 540 s
    python -m tests.on_gpu --results FOLDER       for outcomes.json, on-gpu.log, and the figures of the benchmarks

Where the work tree is replaced between calls, keep the folder of results outside of it, and copy it out: what --rest
and the promises go by is there, and nowhere else.
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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.catalogue import CPU

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "results"
KERNELS = ("tests/kernels", "tests/host_device", "tests/benchmarks")
PROMISED = ("bandwidth", "launches", "clipping", "steps", "kernels", "tensors")  # the sections of most weight
LATER = tuple(key for key in CPU if key not in PROMISED and key != "host")  # host needs no GPU
FIRST = "first-ten-minutes"
FIRST_TESTS = "tests/kernels/test_first_ten_minutes.py"
PARTS = ("ops", "streams", "addresses", "graphs", "bandwidth", "sweep")
FIRST_STEPS = (*(f"first-{part}" for part in PARTS), "memcheck", "initcheck")
# What says how a step ended: pytest's and compute-sanitizer's last words.
SUMMARY = re.compile(
    r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*|^=* ?(?:\d+ \w+,? )+in [\d.]+s.*", re.MULTILINE
)
LEAST = 30.0  # seconds without which a long step is not begun
WIDTH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command, run in the folder of the project."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # packages or programs without which it is left out
    limit: float = 300.0  # seconds after which it is ended
    environment: tuple[tuple[str, str], ...] = ()  # added to this process's


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step."""

    name: str
    verdict: str  # "passed", "FAILED" and why, why it was left out, or that it was cut off for want of time
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name:<15} {self.seconds:>4.0f} s  {self.verdict}"[:WIDTH]


def pytest_over(*where: str, marked: str = "gpu and not slow") -> tuple[str, ...]:
    """Return pytest's command; a test that is too slow fails alone, by a signal, and the others go on."""
    patient = ("--timeout", "150", "--timeout-method", "signal")
    return (
        *(sys.executable, "-m", "pytest", "-v", "--tb", "short", "-m", marked),
        *("--continue-on-collection-errors", "-p", "no:cacheprovider"),
        *(patient if find_spec("pytest_timeout") else ()),
        *where,
    )


def first(part: str) -> tuple[str, ...]:
    """Return the command of a part of the first ten minutes, which prints what it has measured."""
    return (*pytest_over(f"{FIRST_TESTS}::test_{part}", marked="gpu"), "-s")


def run_tests(name: str, *where: str, needs: tuple[str, ...] = (), marked: str = "gpu and not slow") -> Step:
    """Return the step that runs tests."""
    return Step(name=name, command=pytest_over(*where, marked=marked), needs=("pytest", *needs))


def section(key: str) -> Step:
    """Return the step that measures a section of the benchmarks, for the figures alone."""
    command = (sys.executable, "-m", "benchmarks", "cuda", "--only", key, "--keep")
    needs = (key,) if key in {"lightning", "accelerate"} else ()
    return Step(name=key, command=command, needs=needs, limit=200.0)


def checked(tool: str) -> Step:
    """Return the step that runs our kernels, and nearly nothing else, under a tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Each tensor an allocation of its own: torch's cache would hide an access behind the end of one.
    apart = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),) if tool == "memcheck" else ()
    command = (sanitizer, "--tool", tool, "--error-exitcode", "9", *first("ops"))
    return Step(name=tool, command=command, needs=("pytest", sanitizer), limit=280.0, environment=apart)


def steps() -> list[Step]:
    """Return what there is to run, what matters most first."""
    adapters = ("hypothesis", "lightning", "accelerate")
    recipes = ("omegaconf", "sklearn", "matplotlib", "tensorboard", "lightning", "accelerate")
    promises = (sys.executable, "-m", "benchmarks", "cuda", "--promises")
    return [
        *(Step(name=f"first-{part}", command=first(part), needs=("pytest",), limit=240.0) for part in PARTS),
        *map(checked, ("memcheck", "initcheck")),
        Step(name="doctor", command=(sys.executable, "-m", "amp_plugin", "doctor"), needs=("typer",)),
        run_tests("kernel-tests", *KERNELS, "--ignore", FIRST_TESTS),
        *map(section, PROMISED),
        Step(name="promises", command=promises, limit=60.0),
        run_tests("scaling-tests", "tests/scaling"),
        run_tests("casting-tests", "tests/casting"),
        *map(checked, ("racecheck", "synccheck")),
        run_tests("slow-tests", *KERNELS, marked="gpu and slow"),
        run_tests("adapter-tests", "tests/adapters", needs=adapters),
        run_tests("recipe-tests", "tests/recipes", needs=recipes),
        *map(section, LATER),
    ]


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine lacks."""
    found = {need: Path(need).exists() if "/" in need else bool(find_spec(need)) for need in step.needs}
    return [need for need, is_there in found.items() if not is_there]


def run(step: Step, log: Path, limit: float) -> Outcome:
    """Run a step for at most ``limit`` seconds; its output is added to the log as it comes."""
    if lacking := missing(step):
        return Outcome(name=step.name, verdict=f"left out: {', '.join(lacking)} is not installed")
    begin, most = time.perf_counter(), min(step.limit, limit)
    with log.open("ab") as output:
        output.write(f"\n===== {step.name}: {' '.join(step.command)}\n".encode())
        output.flush()
        start = output.tell()
        status = _status(step, output.fileno(), most)
    said = log.read_bytes()[start:].decode(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    told = (SUMMARY.findall(said) or lines or ["no output"])[-1].strip(" =")
    if status is None:
        verdict = f"{'cut off' if most < step.limit else 'FAILED, ended'} after {most:.0f} s: {told}"
    elif status or ("pytest" in step.command and " passed" not in told and "SUMMARY" not in told):
        verdict = f"FAILED, exit status {status}: {told}"
    else:
        verdict = f"passed: {told}"
    return Outcome(name=step.name, verdict=verdict, seconds=time.perf_counter() - begin)


def _status(step: Step, output: int, most: float) -> int | None:
    """Run a command; return its exit status, or None if it was ended with all that it has started."""
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
    """Copy the figures of a folder that another lacks or has an older form of."""
    target.mkdir(parents=True, exist_ok=True)
    for figures in source.glob("nvidia-*.json"):
        other = target / figures.name
        if not other.exists() or other.stat().st_mtime < figures.stat().st_mtime:
            shutil.copy2(figures, other)


def run_steps(chosen: Sequence[Step], outcomes: dict[str, Outcome], folder: Path, within: float) -> None:
    """Run steps one after the other; what does not fit into ``within`` seconds has no outcome."""
    begin = time.perf_counter()
    for step in chosen:
        left = within - (time.perf_counter() - begin)
        if left < min(step.limit, LEAST):
            print(f"{step.name}: not begun, {max(left, 0):.0f} s are left; --rest runs it")
            continue
        outcomes[step.name] = run(step, folder / "on-gpu.log", left)
        print(outcomes[step.name], flush=True)
        scratch = folder / "outcomes.new"
        scratch.write_text(json.dumps([asdict(outcome) for outcome in outcomes.values()], indent=1))
        scratch.replace(folder / "outcomes.json")
        copy_newer(FIGURES, folder)


def asked_for(words: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="Run all that needs a GPU.")
    parser.add_argument("only", nargs="*", metavar="step", choices=[FIRST, *names, []], help="all by default")
    parser.add_argument("--rest", action="store_true", help="only what has no outcome in the results yet")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds; --rest does the others")
    results = Path(tempfile.gettempdir()) / "amp-plugin-on-gpu"
    parser.add_argument("--results", type=Path, default=results, help="folder that is kept")
    asked = parser.parse_args(words)
    if FIRST in asked.only:
        asked.only = [name for name in names if name in {*asked.only, *FIRST_STEPS}]
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if one failed, 2 if there is no GPU."""
    asked = asked_for(words, [step.name for step in steps()])
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; make test-host-device runs these tests without one")
        return 2
    folder: Path = asked.results
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "outcomes.json"
    if not (asked.rest or asked.only):
        file.unlink(missing_ok=True)
        (folder / "on-gpu.log").unlink(missing_ok=True)
    kept = json.loads(file.read_text()) if file.exists() else []
    outcomes = {data["name"]: Outcome(**data) for data in kept}
    copy_newer(folder, FIGURES)
    done = {name for name, outcome in outcomes.items() if not outcome.verdict.startswith("cut off")}
    chosen = [step for step in steps() if not asked.only or step.name in asked.only]
    run_steps(
        [step for step in chosen if not (asked.rest and step.name in done)], outcomes, folder, asked.within
    )
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(*outcomes.values(), f"what failed stands in {folder / 'on-gpu.log'}", sep="\n")
    return int(any(not outcome.verdict.startswith(("passed", "left out")) for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
