"""assert_trains_like distinguishes healthy programs from broken ones, and can compare with golden files."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_plugin import assert_same_numerics, assert_trains_like
from tests.testing.programs import STEPS, apart, differing, healthy
from tests.testing.unseen_programs import DIFFERING, HEALTHY


@pytest.mark.parametrize("number", range(0, 40, 8))
def test_a_program_is_on_its_side_by_the_rule_that_was_stated(number):
    assert apart(healthy()[number]) < 0.05
    assert apart(differing()[number]) > 0.15


SOME = [*range(0, 50, 7), 47, 48]
REST = [number for number in range(50) if number not in SOME]
WHOLE = [*SOME, *(pytest.param(number, marks=pytest.mark.whole_run) for number in REST)]


@pytest.mark.parametrize("number", WHOLE)
def test_a_healthy_program_trains_like_fp32(number):
    _, step = healthy()[number](torch.bfloat16)
    assert_trains_like(step, steps=STEPS)


@pytest.mark.parametrize("number", WHOLE)
def test_a_program_that_differs_does_not(number):
    _, step = differing()[number](torch.bfloat16)
    with pytest.raises(AssertionError, match="does not train like fp32"):
        assert_trains_like(step, steps=STEPS)


UNSEEN = [
    *range(0, 10, 4),
    *(pytest.param(number, marks=pytest.mark.whole_run) for number in range(10) if number % 4),
]


@pytest.mark.parametrize("number", UNSEEN)
def test_programs_that_were_written_after_the_tolerance_are_told_apart(number):
    assert apart(HEALTHY[number]) < 0.05
    _, step = HEALTHY[number](torch.bfloat16)
    assert_trains_like(step, steps=STEPS)
    assert apart(DIFFERING[number]) > 0.15
    _, step = DIFFERING[number](torch.bfloat16)
    with pytest.raises(AssertionError, match="does not train like fp32"):
        assert_trains_like(step, steps=STEPS)


class Spread(nn.Module):
    """Computes a variance as the difference of two large numbers."""

    def __init__(self, *, wrong):
        super().__init__()
        self.inner, self.wrong = nn.Linear(8, 8), wrong

    def forward(self, x):
        y = self.inner(x) + 100
        if self.wrong:
            return (y * y).mean() - y.mean() ** 2  # <-
        return y.float().var()


def a_step(model):
    torch.manual_seed(0)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 8)

    def step(region):
        optimizer.zero_grad()
        with region:
            loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_failure_names_op_module_and_line():
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, code in enumerate(text, 1) if code.endswith("# <-"))
    with pytest.raises(AssertionError) as caught:
        assert_trains_like(a_step(Spread(wrong=True)), precision="bf16")
    assert re.search(r"first in aten::\w+", str(caught.value))
    assert "module      Spread" in str(caught.value)
    assert f"test_assertions.py:{line}" in str(caught.value)


def test_fp32_is_like_fp64_and_without_a_region_nothing_is_rounded():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 8)

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert_trains_like(step, reference="fp64")
    assert_trains_like(step)


@pytest.mark.parametrize("options", [{"reference": "bf16"}, {"precision": "fp8"}, {"steps": 0}])
def test_an_unknown_option_is_refused(options):
    with pytest.raises(ValueError, match="assert_trains_like"):
        assert_trains_like(lambda: None, **options)


def a_run(change=1.0, dtype=torch.bfloat16, noise=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 8)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(x + noise) * change).square().mean()
        loss.backward()
        optimizer.step()


def test_a_golden_file_holds_within_rounding_and_not_beyond(tmp_path, monkeypatch):
    golden = tmp_path / "folder" / "golden.amp"
    with pytest.raises(FileNotFoundError, match="pytest --amp-record"):
        assert_same_numerics(a_run, golden)
    monkeypatch.setenv("AMP_PLUGIN_RECORD", "1")
    assert_same_numerics(a_run, golden)
    monkeypatch.delenv("AMP_PLUGIN_RECORD")
    assert_same_numerics(a_run, golden)
    assert_same_numerics(lambda: a_run(noise=1e-7), golden)
    with pytest.raises(AssertionError, match=r"does not explain(.|\n)*test_assertions\.py"):
        assert_same_numerics(lambda: a_run(change=1.05), golden)
