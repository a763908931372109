"""Training after a user has replaced ``accelerator.scaler``."""

import pickle

import pytest
import torch
from torch import nn

from amp_plugin import GradScaler
from tests.adapters.accelerate_pair import ours, stock

BATCHES = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))


def torchs():
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


def replaced(accelerator, given, when="before prepare"):
    """Prepare a model and an optimizer, and replace the scaler before or after."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    if when == "before prepare":
        accelerator.scaler = given
    prepared = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if when == "after prepare":
        accelerator.scaler = prepared[1].scaler = given
    return prepared


def trained(accelerator, net, optimizer, clip=None):
    for batch in BATCHES:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).square().mean())
            if clip and accelerator.sync_gradients:
                getattr(accelerator, f"clip_grad_{clip}_")(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("make", [torchs, lambda: None], ids=["torch's", "none"])
def test_it_trains_as_under_accelerates_own(make, clip, when):
    finals = []
    for new in (ours, stock):
        accelerator, scaler = new(steps=2), make()
        if scaler is None and new is stock:
            accelerator.unscale_gradients = lambda: None  # Accelerate would call a method of None
        finals.append(trained(accelerator, *replaced(accelerator, scaler, when), clip))
        assert (accelerator.scaler is None) == (scaler is None)
    torch.testing.assert_close(*finals, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, "norm"])
def test_another_scaler_of_ours(clip):
    accelerator = ours()
    given = GradScaler("cpu", init_scale=2.0**20)
    net, optimizer = replaced(accelerator, given)
    mine = trained(accelerator, net, optimizer, clip)
    assert accelerator.scaler is optimizer.scaler is given
    assert given.get_scale() < 2.0**20
    accelerator.scaler = None
    assert optimizer.scaler is None
    accelerator = stock()
    expected = trained(accelerator, *replaced(accelerator, torchs()), clip)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_what_it_does_is_told_saved_and_copied(tmp_path):
    accelerator = ours()
    net, optimizer = replaced(accelerator, torch.amp.GradScaler("cpu", init_scale=8.0))
    told = []
    for factor in (torch.inf, 1.0):
        accelerator.backward(net(BATCHES[0]).sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
        told.append((accelerator.optimizer_step_was_skipped, accelerator.last_step(optimizer).skipped))
    assert told == [(True, True), (False, False)]
    assert accelerator.metrics_since_log().items() >= {"loss_scale": 4.0, "skipped_steps": 1}.items()
    accelerator.save_state(tmp_path)
    twin, copied = pickle.loads(pickle.dumps((accelerator, optimizer)))
    assert copied.scaler is twin.scaler
    assert twin.scaler.get_scale() == 4.0
    accelerator.scaler.update(64.0)
    accelerator.load_state(tmp_path)
    assert accelerator.scaler.get_scale() == 4.0
