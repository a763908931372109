"""torch's clip of gradients that are still multiplied by a loss scale is reported, under diagnose and under
run.
"""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad

import amp_plugin
from amp_plugin.numerics.scaled_clips import ScaledClips
from tests.commands import diagnose as amp

SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "ours": lambda: amp_plugin.GradScaler("cpu", init_scale=1024.0),
}


def trained(clip, scaler, *, steps=3, before=lambda scaler, optimizer: None):
    """Train with a clip after each backward pass. Return the findings."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp_plugin.diagnose(keep_going=True) as diagnosis:
        for _ in range(steps):
            scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
            before(scaler, optimizer)
            clip(model, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return diagnosis.findings


CLIPS = {
    "norm": lambda model, _: utils.clip_grad_norm_(model.parameters(), 0.5),
    "norm by name": lambda model, _: utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.5, norm_type=1),
    "value": lambda model, _: utils.clip_grad_value_([*model.parameters()], clip_value=0.5),
    "one tensor": lambda model, _: clip_grad.clip_grad_norm_(model.weight, 0.5),
    "two calls": lambda model, _: utils.clip_grads_with_norm_(model.parameters(), 0.5, utils.get_total_norm([p.grad for p in model.parameters()])),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("name", CLIPS)
def test_the_line_and_the_cure_are_named_once(name, kind):
    (finding,) = [found for found in trained(CLIPS[name], SCALERS[kind]()) if found.kind == "clip"]
    assert finding.op.startswith("torch.nn.utils.clip_grad")
    assert finding.place.file == __file__
    assert finding.place.text == inspect.getsource(CLIPS[name]).strip()
    assert "the loss scale, 1024, to 0.5" in finding.headline
    assert finding.cures[0].code == "scaler.unscale_(optimizer)"  # with the variable names of this file


def unscale(scaler, optimizer):
    code = "scaler.unscale_(optimizer)"  # the cure of the test above
    exec(code, {"scaler": scaler, "optimizer": optimizer})


@pytest.mark.parametrize("kind", SCALERS)
def test_the_cure_cures(kind):
    assert trained(CLIPS["norm"], SCALERS[kind](), before=unscale) == []


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize(
    "clip",
    [
        lambda model, scaler: utils.clip_grad_norm_(model.parameters(), float("inf")),
        lambda model, scaler: utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale()),
        lambda model, scaler: utils.clip_grad_norm_([torch.ones(2, requires_grad=True)], 0.5),
    ],
    ids=["measures", "limit times the scale", "other parameters"],
)
def test_what_is_right_is_left_alone(clip, kind):
    assert trained(clip, SCALERS[kind]()) == []


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu", enabled=False), amp_plugin.GradScaler("cpu", enabled=False)])  # fmt: skip
def test_a_disabled_scaler_scales_nothing(scaler):
    assert trained(CLIPS["norm"], scaler) == []


def test_an_error_of_torchs_own_stays_and_torch_gets_its_functions_back():
    before = utils.clip_grad_norm_, clip_grad.clip_grad_value_, torch.amp.GradScaler.step
    with ScaledClips([].append), pytest.raises(TypeError):
        utils.clip_grad_norm_()
    assert (utils.clip_grad_norm_, clip_grad.clip_grad_value_, torch.amp.GradScaler.step) == before


SCRIPT = """\
import torch
from torch.nn.utils import clip_grad_norm_

class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def fit(self):
        scaler, opt = self.grad_scaler, self.optimizer
        for _ in range(4):
            scaler.scale(self.model(torch.ones(2, 4)).square().sum()).backward()
            # CURE
            clip_grad_norm_(self.model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        print("trained")

Trainer().fit()
"""


def test_the_command_ends_with_another_status_and_its_line_cures(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = amp(str(script))
    assert result.exit_code == 1
    assert "train.py:15 in fit: clip_grad_norm_(self.model.parameters(), 0.5)" in result.stdout
    assert "scaler.unscale_(opt)" in result.stdout
    script.write_text(SCRIPT.replace("# CURE", "scaler.unscale_(opt)"))
    assert amp(str(script)).exit_code == 0


@pytest.mark.native
def test_run_names_the_line_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "amp_plugin", "run", script]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said.count("clip_grad_norm_ clipped gradients") == 1
    assert "train.py:15 in fit: call scaler.unscale_(opt) before the clip" in said
