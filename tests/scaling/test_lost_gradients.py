"""Gradients that are dropped, overwritten or removed by hooks: which overflows count, and what is refused."""

import itertools
import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import fresh


@pytest.mark.parametrize("update", [False, True])
def test_a_dropped_batch_takes_its_overflow_along(weights, fused, update):
    one, scaler = weights(fused=fused), GradScaler("cpu", init_scale=8.0)
    one.backward(scaler, math.inf)
    scaler.unscale_(one.optimizer)
    one.optimizer.zero_grad(set_to_none=False)
    if update:
        scaler.update()
        assert scaler.get_scale() == 4.0
    scaler.scale(one.loss(2.0)).backward()
    scaler.step(one.optimizer)
    scaler.update()
    result = scaler.last_step(one.optimizer)
    assert (result.skipped, bool(result.overflow_report())) == (False, False)
    assert (one.value, scaler.get_scale()) == (-2.0, 4.0)


DROPS = {
    "dropped": lambda param: setattr(param, "grad", None),
    "zeroed": lambda param: param.grad.zero_(),
    "mended": lambda param: param.grad.nan_to_num_(0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("order", list(itertools.permutations(("drop", "update", "backward"))), ids="-".join)
@pytest.mark.parametrize("drop", DROPS)
def test_one_dropped_gradient_drops_no_batch(order, drop, fused):
    """The other gradient still holds the overflow of that backward pass."""
    overflowed, good = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([overflowed, good], lr=1.0, fused=fused)
    scaler = fresh(optimizer)
    scaler.scale((overflowed * math.inf + 3.0 * good).sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1e9)
    calls = {
        "drop": lambda: DROPS[drop](overflowed),
        "update": scaler.update,
        "backward": lambda: scaler.scale(good.sum()).backward(),
    }
    for name in order:
        calls[name]()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped
    assert torch.equal(good, torch.ones(2))


class TakesGradients(torch.optim.SGD):
    """Removes each gradient as soon as it exists, as optimizers with CPU offload do."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


CAUSES = {
    "a hook takes them away": lambda one, other, scaler: one.backward(scaler),
    "the loss does not reach them": lambda one, other, scaler: other.backward(scaler),
    "they were dropped": lambda one, other, scaler: (one.backward(scaler), one.optimizer.zero_grad()),
}


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_step_for_which_no_gradient_was_checked_is_refused(weights, cause, make):
    """As in torch.amp: a loss was scaled, but there is no gradient to check."""
    taking = cause == "a hook takes them away"
    one, other = weights(optimizer=TakesGradients if taking else torch.optim.SGD), weights()
    scaler = make("cpu", init_scale=8.0)
    if make is GradScaler:
        scaler.register(one.optimizer)
    CAUSES[cause](one, other, scaler)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(one.optimizer)
    assert one.value == 0.0
    if make is GradScaler:
        with pytest.raises(
            AssertionError, match=r"steps within backward\(\) or moves its gradients to the CPU"
        ):
            scaler.clip_and_step(one.optimizer, 1.0)


def test_a_step_without_gradients_is_none_if_another_optimizer_has_some(weights):
    """The loss belongs to the other optimizer, as in a GAN. torch.amp raises an error here."""
    one, other = weights(), weights()
    scaler = fresh(one.optimizer, other.optimizer)
    other.backward(scaler, 2.0)
    scaler.step(one.optimizer)
    scaler.step(other.optimizer)
    scaler.update()
    assert (one.value, other.value) == (0.0, -2.0)
    other.backward(scaler, 2.0)
    scaler.step(other.optimizer)
    other.optimizer.zero_grad()
    scaler.step(one.optimizer)
    assert (one.value, other.value) == (0.0, -4.0)


def test_the_gradients_of_another_optimizer_count_that_got_their_parameters_after_backward():
    shared, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    growing, other = (torch.optim.SGD([shared], lr=1.0) for _ in range(2))
    scaler = fresh(growing, other)
    scaler.scale(late.sum()).backward()
    growing.add_param_group({"params": [late]})
    scaler.step(other)
    scaler.step(growing)
    assert torch.equal(late, torch.zeros(2))


def test_steps_without_gradients_that_are_no_error(weights):
    """Another optimizer has gradients, or the gradients of the optimizer itself were checked before."""
    one, other = weights(), weights()
    for param in one.params:
        param.register_post_accumulate_grad_hook(lambda param: None)
    scaler = fresh(one.optimizer, other.optimizer)
    one.train(scaler, 2.0, 2.0)
    one.optimizer.zero_grad()
    other.backward(scaler)
    scaler.step(one.optimizer)
    scaler.update()
    one.backward(scaler, 2.0)
    scaler.unscale_(one.optimizer)
    one.optimizer.zero_grad()
    scaler.step(one.optimizer)  # checked and then dropped, which torch.amp also allows
    assert one.value == -4.0


@pytest.mark.parametrize("late", [False, True])
def test_an_overflow_written_over_counts_for_each_owner(weights, fused, late):
    """It also counts for an optimizer that is registered later."""
    one = weights(fused=fused)
    two = torch.optim.SGD(one.params[:1], lr=1.0, fused=fused)
    scaler = fresh(one.optimizer, *([] if late else [two]))
    one.backward(scaler, math.inf)
    scaler.clip_grad_value_(one.optimizer, 1.0)
    for optimizer in (one.optimizer, two)[:: -1 if late else 1]:
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).skipped
    scaler.update()
    one.train(scaler, 2.0)
    scaler.step(two)
    assert [param[0].item() for param in one.params] == [-4.0, -2.0, -2.0]
