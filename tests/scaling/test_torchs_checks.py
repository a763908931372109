"""Every misuse that torch.amp's own checks refuse is refused by ours too."""

import contextlib
import gc

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.adapters.takeover import Takeover
from amp_plugin.scaling import gradient_penalty
from amp_plugin.scaling.words import PLAIN
from tests.scaling.runs import fresh

BOTH = pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])


@contextlib.contextmanager
def taken_over():
    """Make scalers as an unedited program does under ``amp-plugin run``."""
    with Takeover("a test"):
        yield torch.amp.GradScaler


FRONT_DOORS = {
    "torch": lambda: contextlib.nullcontext(torch.amp.GradScaler),
    "ours": lambda: contextlib.nullcontext(GradScaler),
    "amp-plugin run": taken_over,
}
DOOR = pytest.mark.parametrize("door", FRONT_DOORS)


def raised(call):
    """Return the type of the error that a call raises, and its text; None if it raises none."""
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return type(error), str(error)
    return None, ""


@DOOR
def test_calls_before_the_first_scaled_loss(weights, door):
    one = weights()
    with FRONT_DOORS[door]() as make:
        scaler, off = make("cpu"), make("cpu", enabled=False)
    calls = {
        "step": lambda scaler: scaler.step(one.optimizer),
        "unscale_": lambda scaler: scaler.unscale_(one.optimizer),
        "update": lambda scaler: scaler.update(),
    }
    for name, call in calls.items():
        kind, text = raised(lambda call=call: call(scaler))
        assert (kind, f"Attempted {name} but _scale is None" in text) == (AssertionError, True)
        assert raised(lambda call=call: call(off))[0] is None


def test_gradients_of_a_bare_backward_before_the_first_scaled_loss(weights):
    """An entry point that scales all losses goes on without gradients, but these were not scaled."""
    scaler, one = GradScaler("cpu", init_scale=8.0), weights()
    scaler.core.shared.speak(PLAIN)
    calls = {
        "unscale_": scaler.unscale_,
        "step": scaler.step,
        "ensure_unscaled": scaler.core.ensure_unscaled,
        "clip_grad_norm_": lambda optimizer: scaler.clip_grad_norm_(optimizer, 1e6),
        "clip_grad_value_": lambda optimizer: scaler.clip_grad_value_(one.params, 1e6),
    }
    one.loss().backward()
    for name, call in calls.items():
        kind, text = raised(lambda call=call: call(one.optimizer))
        assert (kind, f"Attempted {name} but _scale is None" in text) == (AssertionError, True)
    assert (one.value, one.grad) == (0.0, 1.0)
    one.optimizer.zero_grad()
    for name in ("ensure_unscaled", "clip_grad_norm_", "step"):
        calls[name](one.optimizer)
    scaler.update()
    one.train(scaler, 1.0)
    assert (one.value, scaler.get_scale()) == (-1.0, 8.0)


def test_an_update_may_follow_a_recorded_step(weights):
    one, scaler = weights(), GradScaler("cpu", init_scale=8.0)
    one.backward(scaler)
    one.optimizer.zero_grad()
    kind, _ = raised(scaler.update)
    assert kind is AssertionError
    scaler.core.note_step(one.optimizer)
    scaler.update()


@DOOR
@pytest.mark.parametrize("count", [1, 2])
def test_an_update_needs_a_check_since_the_last_one(weights, door, count):
    """A new scale needs none, and uses up the checks before it."""
    every = [weights() for _ in range(count)]
    with FRONT_DOORS[door]() as make:
        scaler = make("cpu", init_scale=8.0)
        told = []
        for _ in range(2):
            for one in every:
                one.backward(scaler)
            told.append(raised(scaler.update))  # none has stepped
            for one in every:
                scaler.step(one.optimizer)
            told.append(raised(scaler.update))
            told.append(raised(scaler.update))  # twice
            for one in every:
                one.optimizer.zero_grad()
        scaler.update(4.0)
        every[0].backward(scaler)
        scaler.unscale_(every[0].optimizer)
        told.append(raised(scaler.update))
        every[0].backward(scaler)
        scaler.step(every[0].optimizer)
        scaler.update(2.0)
        told.append(raised(scaler.update))
    kinds = [kind for kind, _ in told]
    assert kinds == [AssertionError, None, AssertionError] * 2 + [None, AssertionError]
    assert all("No inf checks were recorded prior to update" in text for kind, text in told if kind)
    if door != "torch":
        assert "has stepped no optimizer since. Call scaler.step(optimizer)" in told[0][1]
        assert "no scaled loss has run backward() since" in told[2][1]


@DOOR
def test_a_step_without_gradients_after_an_update(weights, door):
    one = weights()
    with FRONT_DOORS[door]() as make:
        scaler = make("cpu", init_scale=8.0)
        one.train(scaler, 1.0)
        one.optimizer.zero_grad()
        kind, text = raised(lambda: scaler.step(one.optimizer))
        assert (kind, "No inf checks were recorded for this optimizer" in text) == (AssertionError, True)
        assert one.value == -1.0
        if door != "torch":  # torch's scaler then refuses the next good step too
            one.train(scaler, 1.0)
            assert one.value == -2.0


def test_what_may_follow_an_update_although_torch_refuses_it(weights):
    """In a GAN one optimizer may step without gradients, and each step may have an update of its own."""
    critic, generator = weights(), weights()
    scaler = fresh(critic.optimizer, generator.optimizer)
    for _ in range(2):
        critic.backward(scaler)
        scaler.step(generator.optimizer)
        scaler.update()
        scaler.step(critic.optimizer)
        scaler.update()
        critic.optimizer.zero_grad()
    assert (critic.value, generator.value) == (-2.0, 0.0)


def test_an_update_after_calls_that_check_gradients(weights):
    calls = {
        "a clip": lambda scaler, one: scaler.clip_grad_norm_(one.optimizer, 1e6),
        "a clip by value": lambda scaler, one: scaler.clip_grad_value_(one.params, 1e6),
        "clip_and_step": lambda scaler, one: scaler.clip_and_step(one.optimizer, 1e6),
        "a closure": lambda scaler, one: scaler.step(one.optimizer, lambda: one.backward(scaler)),
        "torch's private check": lambda scaler, one: scaler._check_inf_per_device(one.optimizer),
        "a penalty": lambda scaler, one: gradient_penalty(one.loss().square(), one.params, scaler=scaler),
    }
    for name, call in calls.items():
        one = weights()
        scaler = fresh(one.optimizer)
        one.backward(scaler)
        call(scaler, one)
        assert raised(scaler.update)[0] is None, name
        assert raised(scaler.update)[0] is AssertionError, name


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
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
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
