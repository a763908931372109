"""diagnose on many programs: verdict and line are right, the pasted cure works, healthy programs give no
finding.
"""

import pytest

from amp_plugin.casting.rules import is_older, torch_release
from tests.numerics.corpus import (  # noqa: F401 - they register; the fresh ones were written without a look at diagnose
    broken_programs,
    fresh_broken_programs,
    fresh_healthy_programs,
    healthy_programs,
)
from tests.numerics.corpus.programs import BROKEN, HEALTHY, Program, findings_of, wrong_cure, wrong_verdict
from tests.samples import sampled

NAMES = [program.run.__name__ for program in BROKEN]
WRONG_VERDICT = {
    "fresh_an_invertible_convolution_with_a_negative_determinant": (
        "cause 'constant': 'aten::scalar_tensor.default wrote nan on purpose'; it is torch that does so, within logdet, "
        "by the ops that where() with a nan of the program's runs"
    ),
}
# From this torch version on, the backward op of clamp turns an infinity into 0 instead of a nan.
MENDED = {"fresh_a_pose_that_is_already_right": "2.15", "a_clamp_below_1_rounds_to_1_in_bf16": "2.15"}


@pytest.fixture(params=BROKEN, ids=NAMES)
def program(request: pytest.FixtureRequest) -> Program:
    """Return a program that is broken under the installed torch."""
    name = request.param.run.__name__
    if name in MENDED and not is_older(torch_release(), than=MENDED[name]):
        pytest.skip(f"torch {MENDED[name]} has mended it")
    return request.param


def test_the_library_is_large_and_its_names_are_unique() -> None:
    names = [*NAMES, *(run.__name__ for run in HEALTHY)]
    assert len(set(names)) == len(names)
    assert min(len(BROKEN), len(HEALTHY)) >= 60


@pytest.mark.native
def test_what_is_broken_is_named(program: Program, request: pytest.FixtureRequest) -> None:
    name = program.run.__name__
    if name in WRONG_VERDICT:
        request.applymarker(pytest.mark.xfail(strict=True, reason=WRONG_VERDICT[name]))
    assert wrong_verdict(program) == ""


@pytest.mark.native
@pytest.mark.parametrize("program", sampled(BROKEN, range(0, len(BROKEN), 3)), ids=NAMES, indirect=True)
def test_the_cure_cures(program: Program) -> None:
    assert wrong_cure(program) == ""


@pytest.mark.native
@pytest.mark.parametrize(
    "run", sampled(HEALTHY, range(0, len(HEALTHY), 2)), ids=[run.__name__ for run in HEALTHY]
)
def test_what_is_healthy_is_left_alone(run) -> None:
    assert [finding.headline for finding in findings_of(run)] == []
