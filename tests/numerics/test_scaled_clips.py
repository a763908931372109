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
from amp_plugin.mistakes import MISTAKES
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
    assert "the loss scale of 1024: the limit of 0.5 limits" in finding.headline
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


@pytest.mark.parametrize("kind", SCALERS)
def test_a_clip_before_the_scaler_knows_the_optimizer_is_found_at_its_first_call(kind):
    (finding,) = trained(CLIPS["norm"], SCALERS[kind](), steps=1)
    assert finding.place.text == inspect.getsource(CLIPS["norm"]).strip()
    assert "the loss scale of 1024: the limit of 0.5 limits" in finding.headline


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("to_none", [True, False])
def test_a_clip_of_gradients_without_a_scale_before_the_first_scaled_ones_is_right(kind, to_none):
    model, scaler = nn.Linear(4, 4), SCALERS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    with ScaledClips(found.append):
        model(torch.ones(2, 4)).square().sum().backward()
        utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert found == []


@pytest.mark.parametrize("kind", SCALERS)
def test_each_of_two_optimizers_has_its_own_early_clip(kind):
    scaler, found = SCALERS[kind](), []
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with ScaledClips(found.append):
        scaler.scale(sum(model(torch.ones(2, 4)).square().sum() for model in models)).backward()
        scaler.unscale_(optimizers[1])
        utils.clip_grad_norm_(models[1].parameters(), 0.5)
        utils.clip_grad_norm_(models[0].parameters(), 0.25)
        scaler.step(optimizers[1])
        assert found == []
        scaler.step(optimizers[0])
    assert ["the limit of 0.25 " in finding.headline for finding in found] == [True]


NO_UPDATE = SCRIPT.replace("            scaler.update()\n", "")
UNSCALED = NO_UPDATE.replace("# CURE", "scaler.unscale_(opt)")


@pytest.mark.parametrize(
    ("text", "headline", "advice"),
    [
        (NO_UPDATE, "step() was called twice, without update() in between", "AMP004"),
        (UNSCALED, "unscale_() was called after step(), without update() in between", "AMP004"),
        (
            SCRIPT.replace("# CURE", "scaler.unscale_(opt); scaler.unscale_(opt)"),
            "unscale_() was called twice, without step() and update() in between",
            "AMP007",
        ),
    ],
    ids=["step", "unscale after step", "unscale twice"],
)
@pytest.mark.parametrize("ours", [True, False])
def test_diagnose_says_what_a_scalers_error_means(tmp_path, text, headline, advice, ours):
    script = tmp_path / "train.py"
    script.write_text(
        text.replace("torch.amp.GradScaler", "__import__('amp_plugin').GradScaler") if ours else text
    )
    result = amp("--keep-going", str(script))
    assert result.exit_code == 1
    assert headline in result.stdout
    assert MISTAKES[advice].instead in result.stdout
    assert "RuntimeError: " in result.output


@pytest.mark.native
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="clip, step", marks=pytest.mark.whole_run),
        pytest.param("scaler.unscale_(opt)", id="clip, unscale, step"),
    ],
)
def test_run_names_the_line_of_a_program_that_ends_with_an_error_later(tmp_path, before):
    script = tmp_path / "train.py"
    script.write_text(
        NO_UPDATE.replace("            scaler.step", f"            {before}\n            scaler.step")
    )
    command = [sys.executable, "-m", "amp_plugin", "run", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("clip_grad_norm_ clipped gradients") == 1
    assert "train.py:15 in fit: call scaler.unscale_(opt) before the clip" in result.stderr
    error = result.stderr.index("RuntimeError: ")
    assert result.stderr.index("clipped gradients") < result.stderr.index("Traceback") < error


@pytest.mark.native
def test_run_names_the_line_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "amp_plugin", "run", script]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said.count("clip_grad_norm_ clipped gradients") == 1
    assert "train.py:15 in fit: call scaler.unscale_(opt) before the clip" in said
