"""Invariant 1: a gradient is divided by exactly the scale it was made with, once.

Each scenario runs the same code on torch's scaler too, which gets it wrong: so the scenario can fail.
"""

import pytest
import torch

from amp_plugin import GradScaler

STOCK = torch.amp.GradScaler


def fresh(scaler_class, *optimizers, **options):
    scaler = scaler_class("cpu", **{"init_scale": 8.0, "growth_interval": 1, **options})
    if hasattr(scaler, "register"):
        scaler.register(*optimizers)
    return scaler


def outcome(scenario, scaler_class, weights, **options):
    try:
        return scenario(lambda *optimizers: fresh(scaler_class, *optimizers, **options), weights)
    except (AssertionError, RuntimeError) as error:
        return str(error)


def update_after_each_optimizer(scaler_for, weights):
    """Both stock adapters do this: the scale grows between the two steps."""
    a, b = weights(), weights()
    scaler = scaler_for(a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    for model in (a, b):
        scaler.step(model.optimizer)
        scaler.update()
    return a.value, b.value


def overflow_in_the_first_optimizer(scaler_for, weights):
    """The scale backs off between the two steps; the second one is still taken, rightly."""
    a, b = weights(), weights()
    scaler = scaler_for(a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    a.params[0].grad[0] = float("inf")
    for model in (a, b):
        scaler.step(model.optimizer)
        scaler.update()
    return a.value, b.value


def clip_both_then_update_after_each(scaler_for, weights):
    """Accelerate's clip_grad_norm_ unscales all optimizers; the first update() forgets it."""
    a, b = weights(), weights()
    scaler = scaler_for(a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    for model in (a, b):
        scaler.unscale_(model.optimizer)
    for model in (a, b):
        scaler.step(model.optimizer)
        scaler.update()
    return a.value, b.value


def different_cadences(scaler_for, weights):
    """One optimizer steps each micro-batch, the other every second: its window spans an update."""
    a, b = weights(), weights()
    scaler = scaler_for(a.optimizer, b.optimizer)
    for i in range(2):
        a.optimizer.zero_grad()
        scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
        scaler.step(a.optimizer)
        if i == 1:
            scaler.step(b.optimizer)
        scaler.update()
    return a.value, b.value


def critic_steps_twice(scaler_for, weights):
    """n_critic: the same optimizer steps again before update()."""
    a, generator = weights(), weights()
    scaler = scaler_for(a.optimizer, generator.optimizer)
    for _ in range(2):
        a.optimizer.zero_grad()
        scaler.scale(a.loss(3.0)).backward()
        scaler.step(a.optimizer)
    scaler.scale(generator.loss(1.0)).backward()
    scaler.step(generator.optimizer)
    scaler.update()
    return a.value


def shared_parameters(scaler_for, weights):
    """Two optimizers step the same parameters: the first one unscales them in place."""
    a = weights()
    second = torch.optim.SGD(a.params, lr=1.0)
    scaler = scaler_for(a.optimizer, second)
    scaler.scale(a.loss(3.0)).backward()
    scaler.step(a.optimizer)
    scaler.step(second)
    scaler.update()
    return a.value


def unscale_in_mid_window(scaler_for, weights):
    """Gradients are looked at in the middle of an accumulation window."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    scaler.scale(a.loss(3.0)).backward()
    scaler.unscale_(a.optimizer)
    seen = a.grad
    scaler.scale(a.loss(4.0)).backward()
    scaler.step(a.optimizer)
    scaler.update()
    return seen, a.value


def unscale_again_in_mid_window(scaler_for, weights):
    """Accelerate's clip inside accumulate(), on every micro-batch."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    for gradient in (3.0, 4.0):
        scaler.scale(a.loss(gradient)).backward()
        scaler.unscale_(a.optimizer)
    scaler.step(a.optimizer)
    return a.value


def losses_scaled_before_unscale(scaler_for, weights):
    """Both losses are scaled first; only then the backwards, with an unscale_ between."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    first, second = scaler.scale(a.loss(3.0)), scaler.scale(a.loss(4.0))
    first.backward()
    scaler.unscale_(a.optimizer)
    second.backward()
    scaler.step(a.optimizer)
    return a.value


def loss_scaled_before_update(scaler_for, weights):
    """A loss is scaled, the scale changes, and only then its backward runs."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    scaler.scale(a.loss(1.0)).backward()
    early = scaler.scale(a.loss(3.0))
    scaler.step(a.optimizer)
    scaler.update()
    a.optimizer.zero_grad()
    early.backward()
    scaler.step(a.optimizer)
    return a.value


def gradients_are_never_zeroed(scaler_for, weights):
    """Each step adds to what the last one left, as momentum by hand does: 3, then 3 + 4."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    for gradient in (3.0, 4.0):
        scaler.scale(a.loss(gradient)).backward()
        scaler.step(a.optimizer)
        scaler.update()
    return a.value


def update_without_a_step(scaler_for, weights):
    """An optimizer is unscaled, not stepped, and steps after update()."""
    a = weights()
    scaler = scaler_for(a.optimizer)
    scaler.scale(a.loss(3.0)).backward()
    scaler.unscale_(a.optimizer)
    scaler.update()
    scaler.step(a.optimizer)
    return a.value


SCENARIOS = [
    (update_after_each_optimizer, (-3.0, -5.0)),
    (overflow_in_the_first_optimizer, (0.0, -5.0)),
    (clip_both_then_update_after_each, (-3.0, -5.0)),
    (different_cadences, (-6.0, -10.0)),
    (critic_steps_twice, -6.0),
    (shared_parameters, -6.0),
    (unscale_in_mid_window, (3.0, -7.0)),
    (unscale_again_in_mid_window, -7.0),
    (losses_scaled_before_unscale, -7.0),
    (loss_scaled_before_update, -4.0),
    (gradients_are_never_zeroed, -10.0),
    (update_without_a_step, -3.0),
]


@pytest.mark.parametrize(("scenario", "right"), SCENARIOS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_once(scenario, right, fused, weights):
    def make():
        return weights(fused=fused)

    assert outcome(scenario, GradScaler, make) == right


@pytest.mark.parametrize(("scenario", "right"), SCENARIOS, ids=lambda x: getattr(x, "__name__", ""))
def test_torch_gets_them_wrong(scenario, right, weights):
    assert outcome(scenario, STOCK, weights) != right


@pytest.mark.parametrize(("scenario", "right"), SCENARIOS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_fallback_gets_them_right(scenario, right, weights, without_native):
    assert outcome(scenario, GradScaler, weights) == right


# -- what a user does between unscale_ and step -----------------------------------------------------


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_change_by_the_user_does_not_unscale_again(weights, change):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.unscale_(one.optimizer)
    for p in one.params:
        if change == "in place":
            p.grad.mul_(2.0)
        else:
            p.grad = p.grad * 2.0
    scaler.step(one.optimizer)
    assert one.value == -6.0


def test_an_unscaled_regulariser_adds_to_unscaled_gradients(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.unscale_(one.optimizer)
    one.loss(0.5).backward()
    scaler.step(one.optimizer)
    assert one.value == -3.5


def test_another_losss_backward_leaves_unscaled_gradients_unscaled(weights):
    d, g = weights(), weights()
    scaler = fresh(GradScaler, d.optimizer, g.optimizer)
    scaler.scale(d.loss(3.0)).backward()
    scaler.unscale_(d.optimizer)
    scaler.scale(g.loss(5.0)).backward()
    assert d.grad == 3.0
    assert g.grad == 40.0


def test_a_loss_multiplied_by_hand(weights):
    """Nobody sees that backward; then torch's assumption holds: new gradients are scaled."""
    one = weights()
    scaler = fresh(GradScaler, one.optimizer, growth_interval=100)
    scaler.scale(torch.ones(()))
    for set_to_none in (True, False):
        for _ in range(2):
            one.optimizer.zero_grad(set_to_none=set_to_none)
            (one.loss(3.0) * scaler.get_scale()).backward()
            scaler.step(one.optimizer)
            scaler.update()
    assert one.value == -12.0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_zeroing_in_place(weights, set_to_none, fused):
    one = weights(fused=fused)
    scaler = fresh(GradScaler, one.optimizer)
    for gradient in (3.0, float("inf"), 4.0, 5.0):
        one.optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(one.loss(gradient)).backward()
        scaler.step(one.optimizer)
        scaler.update()
    assert one.value == -12.0
    assert scaler.get_scale() == 8.0 * 2 * 0.5 * 2 * 2


def test_a_skipped_fused_step_leaves_unscaled_gradients(weights):
    """What the kernel did is known to the device only; the next backward must still add rightly."""
    one = weights(fused=True)
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(float("inf"))).backward()
    scaler.step(one.optimizer)
    scaler.update()
    for p in one.params:
        p.grad.fill_(3.0)  # as if the overflow had been elsewhere
    scaler.scale(one.loss(4.0)).backward()
    scaler.step(one.optimizer)
    assert one.value == -7.0


def test_optimizers_without_gradients(weights):
    a, b = weights(), weights()
    scaler = fresh(GradScaler, a.optimizer, b.optimizer, growth_interval=100)
    scaler.scale(a.loss(3.0)).backward()
    for model in (b, a, b):
        scaler.ensure_unscaled(model.optimizer)
        scaler.clip_grad_norm_(model.optimizer, 1e9)
    for model in (b, a):
        scaler.step(model.optimizer)
    scaler.update()
    assert (a.value, b.value) == (-3.0, 0.0)
    assert scaler.last_step(b.optimizer).norm is None
    assert not scaler.last_step(b.optimizer).skipped
    assert scaler._get_growth_tracker() == 1


def test_an_optimizer_met_late_is_unscaled_by_the_scale_of_its_backward(weights):
    a, b = weights(), weights()
    scaler = fresh(GradScaler)  # nobody is registered
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    for model in (a, b):
        scaler.step(model.optimizer)
        scaler.update()
    assert (a.value, b.value) == (-3.0, -5.0)


def test_parameters_added_later(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.unscale_(one.optimizer)
    extra = torch.nn.Parameter(torch.zeros(4))
    one.optimizer.add_param_group({"params": [extra]})
    one.params.append(extra)
    (extra * 3.0 * 8.0).sum().backward()
    scaler.step(one.optimizer)
    assert one.value == -3.0
