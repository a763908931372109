"""A step of ``make test-gpu``: a command with a time limit, its output in a log, and what became of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
MOST_NAMED = 8  # failed tests of a step that its outcome names
SAID = re.compile(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*")  # compute-sanitizer's last word


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command.

    Attributes:
        name: For the summary, and to ask for it.
        command: What is run, in the folder of the project; ``{results}`` stands for the log's folder.
        needs: Packages or programs without which it is left out.
        limit: Seconds after which it is ended.
        environment: Added to this process's.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    limit: float = 300.0
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a step.

    Attributes:
        name: Of the step.
        verdict: ``"passed"``, ``"FAILED"`` and why, why it was left out, or that it was cut off before its own limit.
        seconds: It took.
        failures: The first tests that failed, each with the first line of its message, or promises that are missed.
    """

    name: str
    verdict: str
    seconds: float = 0.0
    failures: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it counts against the run."""
        return self.cut_off or self.verdict.startswith("FAILED")

    @property
    def cut_off(self) -> bool:
        """Whether it was ended for want of time, and says nothing yet."""
        return self.verdict.startswith("cut off")


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine lacks."""
    return [
        need
        for need in step.needs
        if not (Path(need).exists() if "/" in need else importlib.util.find_spec(need) is not None)
    ]


def run(step: Step, log: Path, limit: float | None = None) -> Outcome:
    """Run a step.

    Args:
        step: What to run.
        log: Its output is added there as it comes, so that it is complete when something is killed.
        limit: Seconds after which it is ended, if those are fewer than its own.
    """
    if lacking := missing(step):
        return Outcome(name=step.name, verdict=f"left out: {', '.join(lacking)} is not installed")
    most = step.limit if limit is None else min(step.limit, limit)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        record = Path(folder, "tests.xml") if "pytest" in step.command else None
        recorded = ("--junitxml", str(record)) if record else ()
        output.write(f"\n===== {step.name}: {' '.join(step.command)}\n".encode())
        output.flush()
        start = output.tell()
        command = [word.format(results=log.parent) if word == "{results}" else word for word in step.command]
        status = _status((*command, *recorded), output.fileno(), most, dict(step.environment))
        said = log.read_bytes()[start:].decode(errors="replace")
        if status is None:
            verdict, failures = _ended(step, said, most), []
        else:
            verdict, failures = _judged(status, record, said)
    return Outcome(
        name=step.name, verdict=verdict, seconds=time.perf_counter() - begin, failures=tuple(failures)
    )


def _status(command: Sequence[str], output: int, most: float, added: dict[str, str]) -> int | None:
    """Run a command; return its exit status, or None if it was ended with all that it has started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **added},
    )
    try:
        return process.wait(most)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(step: Step, said: str, most: float) -> str:
    how = "cut off" if most < step.limit else "FAILED, ended"
    return f"{how} after {most:.0f} s{_summary(said)}; its last line: {_last_line(said)}"


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "none"


def _summary(said: str) -> str:
    summaries = SAID.findall(said)
    return f"; {summaries[-1]}" if summaries else ""


def _judged(status: int, record: Path | None, said: str) -> tuple[str, list[str]]:
    """Return a step's verdict and its failed tests."""
    told = _summary(said)
    if record is None:
        missed = [line[:200] for line in said.splitlines() if line.startswith("MISSED")][:MOST_NAMED]
        failed = f"FAILED, exit status {status}{told or f'; its last line: {_last_line(said)}'}"
        return f"passed{told}" if status == 0 else failed, missed
    if not record.exists():
        return f"FAILED, exit status {status}, and no test ran{told}", []
    counts, failures = _tests(record)
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    text = (
        f"{passed} passed, {counts['failures'] + counts['errors']} failed, {counts['skipped']} skipped{told}"
    )
    if status:
        return f"FAILED, exit status {status}: {text}", failures
    return (f"passed: {text}" if passed else f"FAILED, nothing ran: {text}"), failures


def _tests(record: Path) -> tuple[dict[str, int], list[str]]:
    """Return pytest's counts, and its failed tests."""
    root = ET.parse(record).getroot()
    suites = list(root.iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    failures = []
    for case in root.iter("testcase"):
        for trouble in (*case.findall("failure"), *case.findall("error")):
            message = (trouble.get("message") or "").partition("\n")[0]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {message[:160]}")
    return counts, failures[:MOST_NAMED]


def save(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write outcomes, all at once."""
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    scratch.replace(file)


def load(file: Path) -> list[Outcome]:
    """Read what `save` wrote; nothing if it was not there."""
    if not file.exists():
        return []
    return [Outcome(**{**data, "failures": tuple(data["failures"])}) for data in json.loads(file.read_text())]
