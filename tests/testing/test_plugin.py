"""The pytest plugin in a user's test suite."""

import importlib.metadata
import subprocess
import sys

import pytest

from tests.commands import ROOT

PLUGIN = "amp_plugin.testing.plugin"
TESTS = """
import sys
import pytest

def test_nothing_is_loaded_before_the_fixture_is_used():
    assert not [name for name in sys.modules if name == "torch" or name.startswith("amp_plugin.numerics")]

def trained(scale):
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=scale)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(2, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

def test_healthy(no_lost_numbers):
    trained(2.0)

def test_skipped(no_lost_numbers):
    trained(2.0**30)

def test_lost_in_a_cast(no_lost_numbers):
    import torch
    torch.tensor([1.0, 1e-9, 1e9]).half()

def test_nan(no_lost_numbers):
    import torch
    weight = torch.zeros(2, requires_grad=True)
    (weight.sqrt() * 0).sum().backward()

def test_golden():
    import torch
    from amp_plugin import assert_same_numerics
    assert_same_numerics(lambda: torch.ones(3) * 2, "golden.amp")
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_user.py").write_text(TESTS)
    return folder


def run(folder, *words):
    installed = any(point.value == PLUGIN for point in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", PLUGIN]  # otherwise it would be registered twice
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", *words]
    path = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=path).stdout


def test_the_fixture_fails_tests_that_lose_numbers(suite):
    text = run(suite, "-k", "not golden")
    assert "3 failed, 2 passed" in text
    assert "1 steps were skipped" in text
    assert "a cast to float16 lost 1 values by overflow" in text
    assert "a cast to float16 lost 1 values by underflow" in text
    assert "test_user.py" in text


@pytest.mark.whole_run
def test_the_option_records_golden_files(suite):
    assert "does not exist; record it with: pytest --amp-record" in run(suite, "-k", "golden")
    assert "1 passed" in run(suite, "-k", "golden", "--amp-record")
    assert "1 passed" in run(suite, "-k", "golden")
