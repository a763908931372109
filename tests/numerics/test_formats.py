"""What do the tools report about layers below 16 bits: format, amax, scales, underflow?"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.numerics.diagnose import Diagnosis
from amp_plugin.run_page.dtypes import Survey
from tests.commands import amp

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao"),
]


def model_and_batch(name="fp8"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 1))
    x = torch.rand(32, 32) + 1
    x[0, 0], x[1, :16] = 1e4, 1e-3  # 16 of 1024 numbers are 1e7 times smaller than the largest
    return amp_plugin.convert(model, name, emulate=True), x


def test_the_log_has_amax_scale_and_underflow_of_each_operand() -> None:
    model, x = model_and_batch()
    with amp_plugin.log_formats(model) as log:
        model(x).sum().backward()
    ranges = log.ranges()
    assert [*ranges] == [("0", "input"), ("0", "weight"), ("0", "gradient")]
    found = ranges["0", "input"]
    assert (found.format, found.calls, found.elements, found.underflowed) == ("fp8", 1, 1024, 16)
    assert found.largest == 1e4
    assert found.largest_scale == found.smallest_scale == pytest.approx(1e4 / 448, rel=1e-3)
    assert ranges["0", "weight"].largest == model[0].weight.abs().max().item()
    assert str(found) == "fp8, amax 1.0e+04, scale 2.2e+01, underflow 1.6%"
    model(x)  # the log is closed now
    assert log.ranges()["0", "input"].calls == 1


def test_the_log_changes_no_number() -> None:
    grads = []
    for is_logged in (False, True):
        model, x = model_and_batch("mxfp8")
        if is_logged:
            with amp_plugin.log_formats(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        grads.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_the_shadow_run_and_diagnose_name_them() -> None:
    model, x = model_and_batch()
    with amp_plugin.shadow_run(model) as run:
        model(x).sum().backward()
    assert "0, input: fp8, amax 1.0e+04, scale 2.2e+01, underflow 1.6%" in run.table().caption
    row = run.to_dict()["formats"][0]
    assert (row["module"], row["operand"], row["format"], row["underflowed"]) == ("0", "input", "fp8", 16)
    with Diagnosis(model) as diagnosis:
        model(x).sum().backward()
    assert "0, input: fp8, amax 1.0e+04, scale 2.2e+01, underflow 1.6%" in diagnosis.report()


def test_a_finding_in_a_converted_layer_names_its_format() -> None:
    model, x = model_and_batch()
    with torch.no_grad():
        model[0].weight.fill_(1e37)
    with Diagnosis(model, keep_going=True) as diagnosis:
        model(x).sum().backward()
    found = diagnosis.findings[0]
    assert (found.module, found.format) == ("0", "fp8")
    assert "  format  fp8; with formats={'0': 'bf16'} this layer computes in bf16" in str(found)
    assert found.to_dict()["format"] == "fp8"


def test_the_page_names_them() -> None:
    model, x = model_and_batch()
    survey = Survey([model])
    survey.open()
    model(x).sum().backward()
    survey.close()
    layer, relu, head = survey.trees([])[0]["inside"]
    assert (layer["computes"], relu["computes"], head["computes"]) == ("fp8", "fp32", "fp32")
    assert layer["numbers"] == "fp8, amax 1.0e+04, scale 2.2e+01, underflow 1.6%"
    assert head["numbers"] == ""


PROGRAM = """
import torch
from torch import nn
import amp_plugin
model = amp_plugin.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8", emulate=True)
with torch.autocast("cpu"):
    model(torch.ones(32, 32)).sum().backward()
"""


def test_the_command_casts_shows_them(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    rows = json.loads(amp("casts", "--json", "train.py").stdout)["formats"]
    found = [(row["module"], row["operand"], row["format"], row["largest"]) for row in rows]
    assert found[0] == ("Sequential.0", "input", "mxfp8", 1.0)
    assert [row[1] for row in found] == ["input", "weight", "gradient"]
    assert "Layers below 16 bits" in amp("casts", "train.py").stdout
