"""--compare names the op at which the incoming error grows suddenly, although the op's own error is only
rounding. One line cures it.
"""

import torch
from torch import nn

from amp_plugin import shadow_run


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
    assert "the arriving error jumps from" in caption
    code = "\n".join(line for line in caption.splitlines() if line.startswith(("import amp", "amp_plugin.")))
    exec(code, {"model": model})
    assert measured(model).jump() is None


def test_a_sound_model_has_none():
    torch.manual_seed(0)
    assert measured(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))).jump() is None
