"""record_run and compare_runs find the first difference, and say whether rounding explains it."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_plugin import autocast
from amp_plugin.numerics.compare import Run, compare_runs, record_run
from amp_plugin.numerics.values import fingerprint
from tests.commands import amp
from tests.numerics.faults import Faults


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, fault=0.0):
        hidden = self.first(x).tanh()
        return self.last(hidden + fault)


def record(path: Path, *, fault_at=-1, enabled=True, steps=3):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_run(path, steps=steps):
        for number in range(3):
            with autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model(torch.randn(8, 16), 0.1 * (number == fault_at)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_the_first_op_of_the_step_that_differs_is_named(tmp_path: Path) -> None:
    found = compare_runs(record(tmp_path / "a.pt"), record(tmp_path / "b.pt", fault_at=1))
    first = found.first
    assert (first.op, first.module) == ("aten::add.Tensor", "Net")
    assert ", step 1," in first.result
    assert f"{Path(__file__).name}:" in first.line
    assert not first.is_rounding
    assert found.unexplained is first
    assert "rounding does not explain it" in found.report()


@pytest.mark.parametrize("op", ["aten::addmm.default", "aten::tanh.default", "aten::mm.default"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_op_whose_kernel_is_wrong_is_named(tmp_path: Path, op, enabled) -> None:
    with Faults() as count:
        record(tmp_path / "a.pt", enabled=enabled)
    at = next(target.number for target in count.targets if target.op == op)
    with Faults(at=at, value=9.0):
        record(tmp_path / "b.pt", enabled=enabled)
    found = compare_runs(tmp_path / "a.pt", tmp_path / "b.pt").unexplained
    assert found.op == op
    assert "the op's own error is" in str(found)


def test_steps_bound_the_file(tmp_path: Path) -> None:
    records = Run.load(record(tmp_path / "a.pt", steps=2)).records
    assert {entry.step for entry in records} == {0, 1}
    with pytest.raises(ValueError, match=r"record_run\(steps=0\): give at least 1"):
        record_run(tmp_path / "b.pt", steps=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_fingerprint_sees_any_bit_and_any_exchange(dtype) -> None:
    x = torch.randn(100, dtype=dtype)
    y, z = x.clone(), x.clone()
    y[57] = y[57] * (1 + 4 * torch.finfo(dtype).eps)
    z[[3, 4]] = z[[4, 3]]
    assert fingerprint(x) == fingerprint(x.clone())
    assert len({fingerprint(tensor).checksum for tensor in (x, y, z)}) == 3
    assert fingerprint(x).difference(fingerprint(2 * x)) == pytest.approx(0.5, rel=0.25)
    y[0] = math.nan
    assert fingerprint(x).difference(fingerprint(y)) == math.inf


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    text = tmp_path / "a.pt"
    text.write_text("no zip")
    torch.save({"other": torch.zeros(2)}, tmp_path / "b.pt")
    torch.save(("an older run", [], [], {}), tmp_path / "c.pt")
    for path in (text, tmp_path / "b.pt", tmp_path / "c.pt"):
        with pytest.raises(ValueError, match=r"make one with: amp-plugin diagnose --save"):
            Run.load(path)
    with record_run(tmp_path / "c.pt"):
        pass
    run = record(tmp_path / "d.pt")
    with pytest.raises(ValueError, match=r"have no result in common; record the same program twice"):
        compare_runs(tmp_path / "c.pt", run)


def test_a_file_without_weights_and_gradients_still_loads(tmp_path: Path) -> None:
    new, old = record(tmp_path / "new.pt"), tmp_path / "old.pt"
    run = Run.load(new)
    assert len(run.gradients) == 12
    torch.save(("amp_plugin run 5", run.records, run.unmeasured), old)
    assert Run.load(old).records == run.records
    found = compare_runs(old, new)
    assert found.is_clean
    assert found.compared == len(run.records)


def test_the_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\ntorch.manual_seed(0)\nx = torch.randn(4, 4)\n"
        "y = (x @ x).relu()\nz = y * float(sys.argv[1])\n"
    )
    runs = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), str(tmp_path / "c.pt")]
    for run, factor in zip(runs, ("1.0", "1.0", "1.5"), strict=True):
        result = amp("diagnose", "--save", run, str(script), factor)
        assert result.exit_code == 0, result.output
        assert f"results of 1 optimizer step are in {run}" in result.stdout
    result = amp("compare", runs[0], runs[1])
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith(
        "0 differ (all results that both runs have are equal, bit for bit)"
    )
    result = amp("compare", runs[0], runs[2])
    assert result.exit_code == 1
    assert "first difference: aten::mul.Tensor, forward, step 0, float32[4x4]" in result.stdout
    answer = json.loads(amp("compare", "--json", runs[0], runs[2]).stdout)
    assert answer["first"]["line"].endswith("train.py:5 in <module>")
    assert answer["first"]["relative"] == pytest.approx(1 / 3, rel=0.3)
    assert "of only one process was given twice, so nothing was" in amp("compare", runs[0], runs[0]).stdout
    assert amp("compare", runs[0], str(script)).exit_code == 2
    assert amp("diagnose", "--save", runs[0], "--strict", str(script)).exit_code == 2


def test_what_does_not_run_again_is_counted_and_named(tmp_path: Path) -> None:
    for name, size in (("a.pt", 1.0), ("b.pt", 1.5)):
        torch.manual_seed(0)
        with record_run(tmp_path / name):
            torch.bernoulli(torch.full((4,), 0.5)) * size
    found = compare_runs(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.unmeasured == {"aten::bernoulli.default": 1}
    measured = "taken as exact, because these ops do not run in fp64"
    assert found.report().endswith(f"{measured}: aten::bernoulli.default (1 call)")


def test_two_integers_that_differ_have_fingerprints_that_differ() -> None:
    counts = torch.arange(200)
    for index in range(200):
        other = counts.clone()
        other[index] += 1
        assert fingerprint(counts).difference(fingerprint(other)) >= 2 / 200**0.5 * 0.9
