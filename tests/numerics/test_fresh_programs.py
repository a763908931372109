"""diagnose on programs that were written without a look at it: where it is wrong, the mark says what it said."""

from __future__ import annotations

import sys

import pytest

from tests.numerics import fresh_broken_programs, fresh_healthy_programs
from tests.numerics.programs import BROKEN, HEALTHY, Program, findings_of, wrong_cure, wrong_verdict

BROKEN_HERE = [program for program in BROKEN if program.run.__module__ == fresh_broken_programs.__name__]
HEALTHY_HERE = [run for run in HEALTHY if run.__module__ == fresh_healthy_programs.__name__]

WRONG_VERDICT: dict[str, str] = {
    "fresh_an_invertible_convolution_with_a_negative_determinant": (
        "cause 'constant': 'aten::scalar_tensor.default wrote nan on purpose'; it is torch that does so, within logdet, "
        "by the ops that where() with a nan of the program's runs"
    ),
}
WRONG_CURE: dict[str, str] = {}
NOT_LEFT_ALONE: dict[str, str] = {}


def with_marks(items: list, name_of, wrong: dict[str, str]) -> list:
    return [
        pytest.param(
            item,
            id=name_of(item),
            marks=[pytest.mark.xfail(strict=True, reason=wrong[name_of(item)])]
            if name_of(item) in wrong
            else [],
        )
        for item in items
    ]


def name_of_program(program: Program) -> str:
    return program.run.__name__


def name_of_function(run) -> str:
    return run.__name__


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has loaded no adapter."""
    for name in ("accelerate", "lightning"):
        monkeypatch.delitem(sys.modules, f"amp_plugin.adapters.{name}", raising=False)


@pytest.mark.native
@pytest.mark.parametrize("program", with_marks(BROKEN_HERE, name_of_program, WRONG_VERDICT))
def test_what_is_broken_is_named(program: Program) -> None:
    assert wrong_verdict(program) == ""


@pytest.mark.native
@pytest.mark.parametrize("program", with_marks(BROKEN_HERE, name_of_program, WRONG_CURE))
def test_the_cure_cures(program: Program) -> None:
    assert wrong_cure(program) == ""


@pytest.mark.native
@pytest.mark.parametrize("run", with_marks(HEALTHY_HERE, name_of_function, NOT_LEFT_ALONE))
def test_what_is_healthy_is_left_alone(run) -> None:
    assert [finding.headline for finding in findings_of(run)] == []
