"""diagnose on a library of programs: verdict and line, the cure pasted and run, and silence where all is well."""

from __future__ import annotations

import sys

import pytest

from tests.numerics import broken_programs, healthy_programs, programs  # noqa: F401 - they register
from tests.numerics.programs import Program, findings_of, wrong_cure, wrong_verdict

# test_fresh_programs.py has its own, some of them with marks
BROKEN = [program for program in programs.BROKEN if ".fresh_" not in program.run.__module__]
HEALTHY = [run for run in programs.HEALTHY if ".fresh_" not in run.__module__]
NAMES = [program.run.__name__ for program in BROKEN]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has loaded no adapter."""
    for name in ("accelerate", "lightning"):
        monkeypatch.delitem(sys.modules, f"amp_plugin.adapters.{name}", raising=False)


def test_the_library_is_large_and_its_names_are_unique() -> None:
    names = [*NAMES, *(run.__name__ for run in HEALTHY)]
    assert len(set(names)) == len(names)
    assert min(len(BROKEN), len(HEALTHY)) >= 50


@pytest.mark.native
@pytest.mark.parametrize("program", BROKEN, ids=NAMES)
def test_what_is_broken_is_named(program: Program) -> None:
    assert wrong_verdict(program) == ""


@pytest.mark.native
@pytest.mark.parametrize("program", BROKEN, ids=NAMES)
def test_the_cure_cures(program: Program) -> None:
    assert wrong_cure(program) == ""


@pytest.mark.native
@pytest.mark.parametrize("run", HEALTHY, ids=[run.__name__ for run in HEALTHY])
def test_what_is_healthy_is_left_alone(run) -> None:
    assert [finding.headline for finding in findings_of(run)] == []
