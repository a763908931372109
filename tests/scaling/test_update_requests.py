"""``update()`` is a request: gradients not used yet keep their scale, or are converted to the new one."""

import gc
import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import fresh


@pytest.mark.parametrize("boundary", ["end_iteration", "scale", "state_dict", "get_scale"])
def test_the_update_is_applied_at_the_boundary(weights, boundary):
    a, b = weights(), weights()
    scaler = fresh(a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    scaler.step(a.optimizer)
    scaler.update()
    call = getattr(scaler, boundary)
    call(torch.ones(())) if boundary == "scale" else call()
    assert (b.grad, scaler.get_scale()) == (80.0, 16.0)
    scaler.step(b.optimizer)
    assert b.value == -5.0


@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_get_scale_tells_of_an_update_although_another_optimizer_has_yet_to_step(weights, make, factor):
    """A program that looks for skips in get_scale() sees them. Only ours divides the other gradients right."""
    first, second = weights(), weights()
    scaler = make("cpu", init_scale=8.0, growth_interval=1)
    first.train(scaler, 1.0)
    second.train(scaler, 1.0)
    scaler.update(8.0)
    first.optimizer.zero_grad()
    second.optimizer.zero_grad()
    scaler.scale(first.loss(factor) + second.loss(3.0)).backward()
    scaler.step(first.optimizer)
    scaler.update()
    assert scaler.get_scale() == (16.0 if factor == 1.0 else 4.0)
    scaler.step(second.optimizer)
    if make is GradScaler:
        assert second.value == -4.0


def test_a_scale_is_read_although_losses_are_not_scaled():
    scaler = GradScaler("cpu", enabled=False)
    assert (scaler.get_scale(), scaler.get_scale("any name")) == (1.0, 1.0)


def test_an_optimizer_of_one_step_is_no_step_past_the_scaler(weights):
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        one = weights()
        scaler.scale(one.loss(1.0)).backward()
        scaler.step(one.optimizer)
        del one
        gc.collect()
        assert scaler.core.optimizers == []
        scaler.update()


def test_setting_the_scale_by_hand_converts_pending_gradients_and_is_told_to_results(weights):
    one = weights()
    scaler = fresh(one.optimizer)
    one.backward(scaler, 3.0)
    scaler.update(32.0)
    assert one.grad == 96.0
    scaler.step(one.optimizer)
    assert one.value == -3.0
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(float("nan"))
    scaler.update(4.0)
    result = scaler.last_step(one.optimizer)
    assert (result.scale_before, result.scale_after) == (32, 4)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_loading_a_state_converts_pending_gradients(weights, scaler_class):
    one, scaler = weights(), scaler_class("cpu", init_scale=8.0)
    one.backward(scaler, 3.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    scaler.step(one.optimizer)
    assert one.value == (-3.0 if scaler_class is GradScaler else -0.75)


def test_rescaling_to_another_than_a_power_of_two_is_right_to_an_ulp():
    torch.manual_seed(0)
    start = torch.randn(1000)
    param = torch.nn.Parameter(torch.zeros(1000))
    scaler = GradScaler("cpu", init_scale=3.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.register(optimizer)
    scaler.scale((param * start).sum()).backward()
    scaler.update(7.0)
    scaler.core.ensure_unscaled(optimizer)
    assert torch.allclose(param.grad, start, rtol=4e-7, atol=0)


def halves():
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    return half, torch.optim.SGD([half], lr=1.0)


@pytest.mark.parametrize("joins", [False, True])
def test_fp16_gradients_are_not_rescaled_the_update_waits(weights, joins):
    """It also waits for the gradients of a parameter that joins after the backward pass."""
    (half, b), one = halves(), weights()
    if joins:
        b = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scaler = fresh(one.optimizer, b, fp16_gradients=True)
    scaler.scale(one.loss(3.0) + (half * 5.0).sum()).backward()
    if joins:
        b.add_param_group({"params": [half]})
    scaler.step(one.optimizer)
    scaler.update()
    scaler.end_iteration()
    assert (scaler.get_scale(), half.grad[0].item()) == (8.0, 40.0)
    scaler.step(b)
    scaler.end_iteration()
    assert (scaler.get_scale(), half[0].item()) == (16.0, -5.0)


def test_fp16_gradients_are_not_converted_by_hand_either():
    half, optimizer = halves()
    scaler = fresh(optimizer, fp16_gradients=True)
    scaler.scale((half * 5.0).sum()).backward()
    state = scaler.state_dict()
    for call in (lambda: scaler.update(2.0), lambda: scaler.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"float16 gradient of parameter \"param_groups.*zero_grad"):
            call()
    scaler.step(optimizer)
    scaler.update(2.0)
    assert (scaler.get_scale(), half[0].item()) == (2.0, -5.0)
