"""A forward in the block that DeepSpeed's ``torch_autocast`` opens; with DeepSpeed: tests/adapters/test_deepspeed.py."""

import pytest
import torch
from torch import nn

from amp_plugin import OpRules, autocast, log_casts, set_default_rules

pytestmark = pytest.mark.native


class Engine(nn.Module):
    """Runs a model as the engine does: in ``torch.autocast``, switched off unless its config has the section."""

    def __init__(self, model, enabled):
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return self.model(x)


@pytest.fixture
def rules():
    set_default_rules(OpRules.default("cpu").with_rule("aten::linear", "fp32"))
    yield
    set_default_rules(None)


def test_the_default_rules_apply_in_it(rules):
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(1, 1, 1))
    conv = Engine(model[1], True)
    assert Engine(model[0], True)(torch.ones(1, 3)).dtype is torch.float32
    assert conv(torch.ones(1, 1, 3)).dtype is torch.bfloat16


def test_the_log_of_casts_sees_it(rules):
    with log_casts() as log:
        Engine(nn.Conv1d(1, 1, 1), True)(torch.ones(1, 1, 3))
    assert len(log) == 3  # input, weight, bias


def test_without_the_section_it_switches_a_region_outside_off():
    with autocast("cpu", dtype=torch.bfloat16):
        assert Engine(nn.Linear(3, 3), False)(torch.ones(1, 3)).dtype is torch.float32
        assert Engine(nn.Linear(3, 3), True)(torch.ones(1, 3)).dtype is torch.bfloat16
