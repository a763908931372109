"""--compare names the op at which the incoming error grows suddenly, although the op's own error is only
rounding. One line cures it.
"""

import json

import pytest
import torch
from torch import nn

from amp_plugin import shadow_run, tune
from tests.commands import amp


class Rotary(nn.Module):
    """Computes the angles of positions as a product, which autocast runs in bf16."""

    def forward(self, x):
        frequencies = 1.0 / 10000 ** (torch.arange(0, 8, dtype=torch.float32) / 8)
        angles = torch.arange(2000.0)[:, None] @ frequencies[None]
        return x * angles.cos()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rotary = nn.Linear(8, 8), Rotary()

    def forward(self, x):
        return self.rotary(self.linear(x))


def measured(model):
    with shadow_run() as run, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2000, 8))
    return run


def test_the_jump_is_named_and_its_line_cures():
    torch.manual_seed(0)
    model = Net()
    run = measured(model)
    (module, op, _), before = run.jump()
    assert (module, op) == ("Net.rotary", "aten::cos.default")
    assert before < 0.02 < 0.1 < run.errors()[module, op, "forward"].arriving
    caption = run.table().caption
    assert "the accumulated error jumps from" in caption
    code = "\n".join(line for line in caption.splitlines() if line.startswith(("import amp", "amp_plugin.")))
    exec(code, {"model": model})
    assert measured(model).jump() is None


def test_a_sound_model_has_none():
    torch.manual_seed(0)
    assert measured(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))).jump() is None


@pytest.mark.native
@pytest.mark.parametrize("reference", ["fp64", "fp32"])
def test_tuning_for_accuracy_names_it(reference):
    torch.manual_seed(0)
    model = Net()

    def step(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()

    found = {
        goal: tune(step, model=model, batches=[torch.ones(2000, 8)], goal=goal, reference=reference)
        for goal in ("accuracy", "casts")
    }
    told, paste = found["accuracy"].jump
    assert "the accumulated error jumps from" in told
    assert "at aten::cos.default in rotary" in told
    assert 'amp_plugin.run_in(torch.float32)(model.get_submodule("rotary"))' in paste
    assert f"# with the default rules, {told}\n" in found["accuracy"].to_yaml()
    assert found["casts"].jump == ()


PROGRAM = """
import torch
from tests.numerics.test_arriving_jump import Net
torch.manual_seed(0)
model = Net()
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2000, 8)).square().mean()
    loss.backward()
"""


@pytest.mark.native
def test_the_command_prints_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--for", "accuracy", "--batches", 1, "--device", "cpu"]
    done = amp("tune", *options, "train.py")
    assert done.exit_code == 0, done.output
    assert "with the default rules, the accumulated error jumps from" in done.stdout
    assert 'amp_plugin.run_in(torch.float32)(model.get_submodule("rotary"))' in done.stdout
    done = amp("tune", *options, "--json", "--force", "train.py")
    assert len(json.loads(done.stdout)["jump"]) == 2
