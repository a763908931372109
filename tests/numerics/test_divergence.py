"""If the learning rate is far too high, page, monitor and diagnose name it, and suggest no wider dtype."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_plugin import GradScaler, diagnose
from amp_plugin.adapters.session import endless_skips
from amp_plugin.numerics.growth import WeightGrowth
from amp_plugin.scaling.words import PLAIN


def train(lr, steps=40):
    """Train in fp16. Return the growth, the last step and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    growth = WeightGrowth([model])
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=lr), GradScaler("cpu")
    steps_seen = []
    scaler.core.log.subscribe(steps_seen.append)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(torch.rand(32, 16)), torch.randint(10, (32,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.core.log.read(wait=True)
    return growth, steps_seen[-1], model


def test_the_error_of_endless_skips_names_the_learning_rate():
    growth, step, _model = train(lr=3000.0)
    assert step.in_a_row > 20
    text = str(endless_skips(step, PLAIN, growth))
    assert "times as large as at the start: the training diverges. Lower the learning rate" in text
    assert PLAIN.bf16 not in text


def test_weights_that_have_not_grown_get_the_advice_on_dtypes():
    growth, step, _model = train(lr=0.01)
    assert growth.advice() == ""
    assert PLAIN.bf16 in str(endless_skips(step, PLAIN, growth))


def test_nan_weights_have_grown_and_nobody_is_kept_alive_or_pickled():
    model = nn.Linear(2, 2)
    growth = WeightGrowth([model])
    assert growth.factor() == 1.0
    nn.init.constant_(model.weight, float("nan"))
    assert growth.factor() == float("inf")
    assert pickle.loads(pickle.dumps(growth)).factor() == copy.deepcopy(growth).factor() == 1.0
    del model
    assert growth.factor() == 1.0


@pytest.mark.parametrize("begun", [float("nan"), float("inf")])
def test_weights_that_begin_without_a_finite_norm_have_not_grown(begun):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, begun)
    growth = WeightGrowth([model])
    assert growth.factor() == 1.0
    nn.init.constant_(model.bias, 1000.0)
    assert growth.factor() > 100


@pytest.mark.parametrize("lr", [300.0, 0.01])
def test_the_page_and_diagnose_judge_alike(lr, tmp_path):
    pytest.importorskip("altair")
    from amp_plugin import report
    from amp_plugin.run_page.page import in_short

    def program(scaler):
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(torch.rand(32, 64)), torch.randint(10, (32,)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    for watch in ("page", "diagnose"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=lr), GradScaler("cpu")
        if watch == "page":
            with report(scaler, model, tmp_path / "run.html") as page:
                program(scaler)
            said = " ".join(in_short(page.history, [], [], "amp-plugin diagnose train.py")["what to change"])
        else:
            with diagnose(keep_going=True) as diagnosis:
                program(scaler)
            said = diagnosis.report()
        assert ("Lower the learning rate" in said) is (lr == 300.0)
        if lr == 300.0:
            assert "bf16" not in said
            assert "paste" not in said
