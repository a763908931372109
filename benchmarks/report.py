"""A benchmark report, saved as JSON, with measurements, machine and date."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Outcome
from benchmarks.setting import Plot

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionRecord:
    """The measurements of a section.

    Attributes:
        date: The day of the run, ISO, UTC.
        seconds: The wall time of the whole section.
        threads: The number of torch's threads.
        timing: A text that says which clock was used.
    """

    date: str
    seconds: float
    threads: int
    timing: str
    plots: tuple[Plot, ...]
    outcomes: tuple[Outcome, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SectionRecord:
        """Convert the result of ``dataclasses.asdict`` back to a SectionRecord."""
        outcomes = tuple(Outcome.from_dict(outcome) for outcome in data["outcomes"])
        plots = tuple(Plot(**plot) for plot in data["plots"])
        return cls(**{**data, "outcomes": outcomes, "plots": plots})


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All benchmark sections that were measured on one machine with one release of torch.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        machine: The model name of the CPU or GPU. Host names are not recorded.
        details: Other facts that the figures depend on, such as the instruction set or the driver's CUDA
            version.
        sections: The measurements of each section, in the order of the report.
        parts: The checks of a GPU run that are not benchmarks, with name, result and duration in seconds.
    """

    device: str
    machine: str
    details: str
    torch: str
    python: str
    sections: dict[str, SectionRecord] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def here(cls, device: str) -> Report:
        """Return a new report for this machine, without any sections."""
        return cls(
            device=device,
            machine=torch.cuda.get_device_name() if device == "cuda" else processor(),
            details=_cuda_details() if device == "cuda" else torch.backends.cpu.get_cpu_capability(),
            torch=torch.__version__,
            python=platform.python_version(),
        )

    @property
    def path(self) -> Path:
        """The path of the report's JSON file, named ``<machine>-<torch>.json``."""
        machine = re.sub(r"[^a-z0-9]+", "-", self.machine.lower()).strip("-")
        return RESULTS / f"{machine}-{self.torch}.json"

    def to_json(self) -> str:
        """Return the report as JSON text, with numbers rounded to six significant digits."""
        return json.dumps(_rounded(asdict(self)), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Parse the JSON text that ``to_json`` has written."""
        data = json.loads(text)
        sections = {key: SectionRecord.from_dict(section) for key, section in data["sections"].items()}
        return cls(**{**data, "sections": sections})


def today() -> str:
    """Return the date, ISO, UTC."""
    return dt.datetime.now(tz=dt.timezone.utc).date().isoformat()


def processor() -> str:
    """Return the CPU model and the number of cores, such as ``AMD EPYC, 2 cores``."""
    name = platform.processor() or platform.machine()
    known = Path("/proc/cpuinfo")
    if known.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", known.read_text(encoding="utf-8"), re.MULTILINE)
        name = found.group(1) if found else name
    name = re.sub(r"\((R|TM)\)| CPU| Processor| @.*|\s\d+-Core", "", name).strip()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _cuda_details() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}, CUDA {torch.version.cuda}"


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list | tuple) else data
