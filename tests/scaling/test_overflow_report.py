"""What a report of overflowed gradients says, and what it never says."""

import math

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import OverflowReport


def test_it_is_short_for_many_and_begins_at_the_loss():
    report = OverflowReport(inf=tuple(f"p{i}" for i in range(9)), checked=12)
    assert report.summary() == "inf in 9 gradients: p8, p7, p6, p5, p4 and 4 more"
    assert report.meaning() == (
        "Others are finite: look at the backward pass near the first one named, or compute its module in fp32."
    )
    assert str(report) == f"{report.summary()}\n{report.meaning()}"


def test_all_at_once_points_to_the_forward_pass():
    report = OverflowReport(nan=("a", "b"), checked=2)
    assert report.meaning() == (
        "All gradients at once: the loss or the forward pass is not finite: amp_plugin.diagnose() finds the op."
    )
    scaled = OverflowReport(inf=("a", "b"), checked=2, scaled=True)
    assert scaled.meaning().startswith("All gradients at once: the loss scale is still too high, which a few")
    assert "amp_plugin.diagnose() finds the op" in scaled.meaning()


def test_an_overflow_elsewhere_and_one_nobody_has_looked_at():
    assert OverflowReport(elsewhere=True).summary() == "overflow on another rank"
    assert "look at that rank's batch" in str(OverflowReport(elsewhere=True))
    unattributed = OverflowReport(unattributed=True)
    assert unattributed
    assert unattributed.summary() == "the norm of the gradients is not finite"
    assert "on_nonfinite='skip' looks, and" in str(unattributed)


def test_no_overflow_means_nothing():
    assert (str(OverflowReport(checked=3)), OverflowReport(checked=3).meaning()) == ("no overflow", "")


@pytest.mark.parametrize("init_scale", [1.0, 8.0, None])
def test_it_knows_whether_a_scale_may_be_the_cause(init_scale):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=init_scale is not None, init_scale=init_scale or 1.0)
    scaler.register(optimizer, names=model)
    scaler.scale(model(torch.full((1, 2), math.nan)).sum() * math.nan).backward()
    scaler.step(optimizer)
    report = scaler.last_step(optimizer).overflow_report()
    assert (report.inf, report.nan, report.checked, report.named) == ((), ("weight", "bias"), 2, True)
    assert report.scaled is (init_scale == 8.0)


def test_no_overflow_is_never_said_beside_a_norm_that_is_nan(weights):
    one = weights()
    scaler = GradScaler("cpu", enabled=False, on_nonfinite="ignore")
    one.loss(math.nan).backward()
    assert math.isnan(scaler.clip_grad_norm_(one.optimizer, 1.0).item())
    scaler.step(one.optimizer)
    assert math.isnan(scaler.last_step(one.optimizer).norm.item())
    assert str(scaler.last_step(one.optimizer).overflow_report()).startswith(
        "the norm of the gradients is not"
    )
