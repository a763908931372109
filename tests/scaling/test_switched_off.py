"""If a program turns a scaler off and on by ``_enabled``, does ours behave like torch's?"""

import pytest
import torch

from amp_plugin import GradScaler

KINDS = [torch.amp.GradScaler, GradScaler]


def train(kind, is_on, *, clips=False, zeroes=True, make=torch.optim.SGD):
    """Train one weight with the scaler on or off in each iteration.

    Return weight, gradient and scale after each.
    """
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, optimizer, seen = kind("cpu", init_scale=4.0, growth_interval=2), make([weight], lr=0.5), []
    for number, on in enumerate(is_on):
        scaler._enabled = on
        if zeroes:
            optimizer.zero_grad()
        scaler.scale((weight * (number + 1)).sum()).backward()
        seen.append(weight.grad.tolist())
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((weight.tolist(), weight.grad.tolist(), scaler.get_scale(), scaler.is_enabled()))
    return seen


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("is_on", ["1100", "0000", "1011", "10101", "0111"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Rprop])
def test_phases_without_a_scale_are_as_in_torch(is_on, clips, make):
    on = [letter == "1" for letter in is_on]
    ours, theirs = (train(kind, on, clips=clips, make=make) for kind in reversed(KINDS))
    assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_was_dropped_before_is_forgotten(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, optimizer = kind("cpu", init_scale=4.0), torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()  # dropped
    optimizer.zero_grad()
    scaler._enabled = False
    scaler.scale(weight.sum()).backward()
    optimizer.step()
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), weight.grad.tolist()) == ([-0.5] * 4, [1.0] * 4)


def test_one_that_was_made_without_a_scale_can_be_switched_on():
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, optimizer = GradScaler("cpu", init_scale=4.0, enabled=False), torch.optim.SGD([weight], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler._enabled = True
    assert (weight.tolist(), weight.grad.tolist()) == ([0.0] * 4, [1.0] * 4)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    assert weight.grad.tolist() == [4.0] * 4
    with pytest.raises(RuntimeError, match="past the scaler"):
        optimizer.step()
