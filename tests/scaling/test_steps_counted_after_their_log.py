"""The totals of steps are right although the host learns late of steps, and although their scaler is gone."""

import gc
import weakref

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling.step_log import StepResult, StepTotals, new_logs


def trained(batches=(1.0, float("inf"), 1.0)):
    """Train with a scaler for one step per batch, and return it."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=1024.0)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale((weight * batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.fixture
def totals():
    totals = StepTotals()
    with new_logs(totals.follow):
        yield totals


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_steps_and_scale_are_counted_once(totals, monkeypatch, is_late, is_gone):
    if is_late:  # as on a GPU
        monkeypatch.setattr(StepResult, "skipped_if_known", lambda step: None)
    scaler = trained()
    log = weakref.ref(scaler.core.log)
    assert len(log().unread_steps()) == 3 * is_late
    if is_gone:
        del scaler
        gc.collect()
    assert (log() is None) is is_gone
    known = (0, 0) if is_late else (3, 1)
    assert totals.told(wait=False)[:2] == known
    assert totals.told(wait=True) == (3, 1, 512.0)
    assert totals.told(wait=True) == (3, 1, 512.0)  # telling changes nothing


def test_a_reset_forgets_all(totals):
    scaler = trained()
    totals.start_over()
    assert totals.told(wait=True) == (0, 0, None)
    del scaler


def test_nothing_scaled_has_no_scale(totals):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", enabled=False)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert totals.told(wait=True) == (1, 0, None)
