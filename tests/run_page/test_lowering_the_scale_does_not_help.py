"""A step was taken at a high loss scale, and later ones are nan at any scale: the page does not blame the scale."""

import pytest
import torch

pytest.importorskip("altair")

from amp_plugin import GradScaler, report
from tests.run_page.test_report import text_of


def train(page, *, poisoned, steps=8):
    model = torch.nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**16)
    with report(scaler, model, page) as shown:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            if step in poisoned:  # finite, with a gradient of 0 / 0
                loss = loss + (model.weight[0, 0] * 0).sqrt()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return shown.history


def test_skips_at_ever_lower_scales_after_a_step_was_taken_name_the_command(tmp_path):
    history = train(tmp_path / "run.html", poisoned=range(2, 8))
    assert not any(skip.blames_scale for skip in history.skips)
    text = text_of(tmp_path / "run.html")
    assert "a lower loss scale did not help" in text
    assert "amp-plugin diagnose" in text
    assert "the loss scale was too high" not in text
    assert "compute them in fp32" not in text


def test_one_skip_now_and_then_is_the_scalers_business(tmp_path):
    history = train(tmp_path / "run.html", poisoned=(5,))
    assert all(skip.lowering_helps for skip in history.skips)
    assert "a lower loss scale did not help" not in text_of(tmp_path / "run.html")


def test_an_optimizer_that_has_not_stepped_yet_still_looks_for_its_scale(tmp_path):
    history = train(tmp_path / "run.html", poisoned=range(5))
    assert all(skip.lowering_helps for skip in history.skips)


def test_if_a_step_was_taken_again_the_lower_scale_may_have_helped(tmp_path):
    history = train(tmp_path / "run.html", poisoned=range(2, 6))
    assert [skip.in_a_row for skip in history.skips] == [1, 2, 3, 4]
    assert all(skip.lowering_helps for skip in history.skips)
    assert "a lower loss scale did not help" not in text_of(tmp_path / "run.html")
