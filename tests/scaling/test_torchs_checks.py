"""Every misuse that torch.amp's own checks refuse is refused by ours too."""

import gc

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import fresh

BOTH = pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])


@BOTH
@pytest.mark.parametrize("unscales", [False, True])
def test_a_forgotten_update_is_an_error_at_the_second_step(weights, scaler_class, unscales):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    one.backward(scaler)
    scaler.step(one.optimizer)
    one.backward(scaler)
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
        one.backward(scaler)
        return one.loss()

    scaler.scale(one.loss())
    scaler.step(one.optimizer, closure)
    with pytest.raises(RuntimeError, match=r"call scaler.update\(\) once per iteration"):
        scaler.step(one.optimizer, closure)


def test_a_forgotten_update_of_two_optimizers(weights):
    """A critic may step again before its generator, which torch refuses.

    When both have stepped, an update is due.
    """
    critic, generator = weights(), weights()
    scaler = fresh(critic.optimizer, generator.optimizer)
    for one in (critic, critic, generator):
        one.backward(scaler)
        scaler.step(one.optimizer)
    critic.backward(scaler)
    with pytest.raises(RuntimeError, match="register"):
        scaler.step(critic.optimizer)


@BOTH
def test_an_update_after_a_step_past_the_scaler_is_an_error(weights, scaler_class):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    one.backward(scaler)
    one.optimizer.step()
    wanted = AssertionError if scaler_class is torch.amp.GradScaler else RuntimeError
    with pytest.raises(wanted, match=r"(?i)no (inf checks were|gradient was check)"):
        scaler.update()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"momentum": 0.9}])
@BOTH
def test_a_step_past_the_scaler_with_scaled_gradients(weights, scaler_class, options):
    """torch.amp takes a step with gradients that are eight times too large."""
    one, scaler = weights(**options), scaler_class("cpu", init_scale=8.0)
    one.train(scaler, 1.0)
    one.backward(scaler)
    if scaler_class is torch.amp.GradScaler:
        one.optimizer.step()
        assert one.value <= -9.0
        return
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) is called past the scaler.*scaler.unscale_"):
        one.optimizer.step()
    assert one.value == -1.0
    scaler.unscale_(one.optimizer)  # the right way
    one.optimizer.step()
    assert one.value <= -2.0


def test_a_loss_that_was_not_scaled_steps_past_the_scaler(weights):
    one = weights()
    scaler = fresh(one.optimizer)
    one.train(scaler, 1.0)
    one.optimizer.zero_grad()
    one.loss().backward()
    one.optimizer.step()
    assert one.value == -2.0
    del scaler
    gc.collect()
    assert not one.optimizer._optimizer_step_pre_hooks, "a scaler that is gone leaves nothing behind"


@BOTH
@pytest.mark.parametrize("at_once", [False, True])
def test_finite_gradients_whose_norm_overflows_are_clipped_to_zero(weights, scaler_class, at_once):
    one, scaler = weights(optimizer=torch.optim.AdamW, fused=True), scaler_class("cpu", init_scale=1.0)
    one.backward(scaler, 3e38)
    if scaler_class is GradScaler and at_once:
        norm = scaler.clip_and_step(one.optimizer, 1.0).norm
    else:
        scaler.unscale_(one.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(one.params, 1.0)
        scaler.step(one.optimizer)
    assert (norm.item(), one.grad) == (torch.inf, 0.0)
    assert len(one.optimizer.state) == len(one.params), "the step was taken"
