"""torch.amp's own checks next to ours: a misuse that torch refuses is refused here too, and some it does not see."""

import gc

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import fresh

BOTH = pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])


def backward(scaler, one, gradient=1.0):
    one.optimizer.zero_grad()
    scaler.scale(one.loss(gradient)).backward()


@BOTH
@pytest.mark.parametrize("unscales", [False, True])
def test_a_forgotten_update_is_an_error_at_the_second_step(weights, scaler_class, unscales):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    backward(scaler, one)
    scaler.step(one.optimizer)
    backward(scaler, one)
    call = scaler.unscale_ if unscales else scaler.step
    text = r"called after step\(\)" if unscales else r"step\(\) has already been called since the last update"
    with pytest.raises(RuntimeError, match=text):
        call(one.optimizer)
    assert one.value == -1.0
    scaler.update()
    scaler.step(one.optimizer)
    assert one.value == -2.0


def test_a_forgotten_update_of_a_closure(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0), weights(optimizer=torch.optim.LBFGS)

    def closure():
        backward(scaler, one)
        return one.loss()

    scaler.scale(one.loss())
    scaler.step(one.optimizer, closure)
    with pytest.raises(RuntimeError, match=r"Call update\(\) once per iteration"):
        scaler.step(one.optimizer, closure)


def test_a_forgotten_update_of_two_optimizers(weights):
    """A critic may step again before its generator, which torch refuses; once both have, an update is due."""
    critic, generator = weights(), weights()
    scaler = fresh(critic.optimizer, generator.optimizer)
    for one in (critic, critic, generator):
        backward(scaler, one)
        scaler.step(one.optimizer)
    backward(scaler, critic)
    with pytest.raises(RuntimeError, match="register"):
        scaler.step(critic.optimizer)


def test_a_constant_scale_needs_no_update(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0, dynamic=False), weights()
    for _ in range(2):
        backward(scaler, one)
        scaler.step(one.optimizer)
    assert one.value == -2.0


@BOTH
def test_an_update_after_a_step_past_the_scaler_is_an_error(weights, scaler_class):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    backward(scaler, one)
    one.optimizer.step()
    wanted = AssertionError if scaler_class is torch.amp.GradScaler else RuntimeError
    with pytest.raises(wanted, match=r"(?i)no (inf checks were|gradient was check)"):
        scaler.update()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"momentum": 0.9}])
@pytest.mark.parametrize("given", [GradScaler, torch.amp.GradScaler])
def test_a_step_past_the_scaler_with_scaled_gradients(weights, given, options):
    """torch.amp steps with gradients eight times too large."""
    one = weights(**options)
    scaler = given("cpu", init_scale=8.0)
    backward(scaler, one)
    scaler.step(one.optimizer)
    scaler.update()
    backward(scaler, one)
    if given is torch.amp.GradScaler:
        one.optimizer.step()
        assert one.value <= -9.0
        return
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called past the scaler.*scaler.unscale_"):
        one.optimizer.step()
    assert one.value == -1.0
    scaler.unscale_(one.optimizer)  # as it is right
    one.optimizer.step()
    assert one.value <= -2.0


def test_a_loss_that_was_not_scaled_steps_past_the_scaler(weights):
    one = weights()
    scaler = fresh(one.optimizer)
    backward(scaler, one)
    scaler.step(one.optimizer)
    scaler.update()
    one.optimizer.zero_grad()
    one.loss().backward()
    one.optimizer.step()
    assert one.value == -2.0
    del scaler
    gc.collect()
    assert not one.optimizer._optimizer_step_pre_hooks, "a scaler that is gone leaves nothing behind"


@BOTH
@pytest.mark.parametrize("fold", [False, True])
def test_finite_gradients_whose_norm_overflows_are_clipped_to_zero(weights, scaler_class, fold):
    one = weights(optimizer=torch.optim.AdamW, fused=True)
    scaler = scaler_class("cpu", init_scale=1.0)
    backward(scaler, one, 3e38)
    if scaler_class is GradScaler:
        norm = scaler.clip_grad_norm_(one.optimizer, 1.0, fold=fold)
        scaler.step(one.optimizer)
        assert not scaler.last_step(one.optimizer).skipped
    else:
        scaler.unscale_(one.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(one.params, 1.0)
        scaler.step(one.optimizer)
    assert norm.item() == torch.inf
    assert one.grad == 0.0
    assert len(one.optimizer.state) == len(one.params), "the step was taken"


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_a_zero_dimensional_parameter_first(scaler_class, fused):
    def trained(scaler, dtype, **options):
        start = torch.tensor(2.0, dtype=dtype), torch.linspace(-1, 1, 120, dtype=dtype).view(2, 3, 4, 5)
        shift, weight = map(torch.nn.Parameter, start)
        optimizer = torch.optim.AdamW([shift, weight], lr=0.5, **options)
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale((shift * weight.square()).sum()).backward()
            if i == 1:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if i == 1 and scaler_class is GradScaler:  # torch's fused step goes through memory
                weight.data = weight.data.to(memory_format=torch.channels_last)
        return [shift.double(), weight.double()]

    right = trained(torch.amp.GradScaler("cpu", enabled=False), torch.float64)
    trained_here = trained(scaler_class("cpu"), torch.float32, fused=fused)
    torch.testing.assert_close(trained_here, right, rtol=1e-5, atol=1e-6)
