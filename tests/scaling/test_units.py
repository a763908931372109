"""Invariant 1: a gradient is divided by exactly the scale it was made with, once.

Each scenario runs the same code on torch's scaler too, which gets it wrong: so the scenario can fail.
"""

import gc

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
    a = weights()
    scaler = scaler_for(a.optimizer)
    for _ in range(2):
        a.optimizer.zero_grad()
        scaler.scale(a.loss(3.0)).backward()
        scaler.step(a.optimizer)
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
    for gradient, total in ((float("inf"), None), (3.0, -3.0 - 7.0)):
        one = weights(fused=True)
        scaler = fresh(GradScaler, one.optimizer)
        scaler.scale(one.loss(gradient)).backward()
        scaler.step(one.optimizer)
        scaler.update()
        if total is None:
            for p in one.params:
                p.grad.fill_(3.0)  # as if the overflow had been elsewhere
            scaler.scale(one.loss(4.0)).backward()
            scaler.step(one.optimizer)
            assert one.value == -7.0
        else:
            scaler.scale(one.loss(4.0)).backward()
            scaler.step(one.optimizer)
            assert one.value == total


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


# -- update() is a request --------------------------------------------------------------------------


def test_the_update_waits_for_pending_gradients(weights):
    a, b = weights(), weights()
    scaler = fresh(GradScaler, a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    scaler.step(a.optimizer)
    scaler.update()
    assert (scaler.get_scale(), b.grad) == (8.0, 40.0)
    scaler.step(b.optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize("boundary", ["end_iteration", "scale", "state_dict"])
def test_the_update_is_applied_at_the_boundary(weights, boundary):
    a, b = weights(), weights()
    scaler = fresh(GradScaler, a.optimizer, b.optimizer)
    scaler.scale(a.loss(3.0) + b.loss(5.0)).backward()
    scaler.step(a.optimizer)
    scaler.update()
    call = getattr(scaler, boundary)
    call(torch.ones(())) if boundary == "scale" else call()
    assert (scaler.get_scale(), b.grad) == (16.0, 80.0)
    scaler.step(b.optimizer)
    assert b.value == -5.0


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_forgotten_update_is_noticed(weights, dynamic):
    """torch.amp refuses the second step; ours may belong to one iteration, so many are needed to tell."""
    scaler, one = GradScaler("cpu", init_scale=8.0, dynamic=dynamic), weights()

    def steps(count):
        for _ in range(count):
            scaler.scale(one.loss(1.0)).backward()
            scaler.step(one.optimizer)

    steps(199)
    scaler.update()
    steps(199)
    if dynamic:
        with pytest.warns(UserWarning, match=r"200 steps of SGD without scaler.update\(\): .* Call update"):
            steps(1)
    steps(200)  # said once


def test_a_step_past_the_scaler_is_noticed(weights):
    """torch.amp raises there; ours may accumulate over updates, if it knows the optimizer."""
    scaler, one = GradScaler("cpu", init_scale=8.0), weights()
    scaler.scale(torch.ones(()))
    scaler.update()
    scaler.scale(one.loss(1.0)).backward()
    one.optimizer.step()
    assert one.value == -8.0, "the scaled gradients"
    with pytest.warns(
        UserWarning, match=r"Call scaler.step\(optimizer\) instead of optimizer.step\(\)"
    ) as seen:
        scaler.update()
    assert seen[0].filename == __file__
    scaler.register(one.optimizer)
    scaler.update()


def test_an_optimizer_of_one_step_is_no_step_past_the_scaler(weights):
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        one = weights()
        scaler.scale(one.loss(1.0)).backward()
        scaler.step(one.optimizer)
        del one
        gc.collect()
        assert len(scaler._registry) == 0
        scaler.update()


@pytest.mark.parametrize("names", ["abc", ["a", "a"]])
def test_names_of_losses_are_a_list_without_repeats(names):
    with pytest.raises(ValueError, match=r"losses=.* is not allowed; give a list of different names"):
        GradScaler("cpu", losses=names)


def test_a_device_there_is_not():
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        GradScaler("gpu")


def test_no_update_without_a_check(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss())
    scaler.update()
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_setting_the_scale_by_hand_converts_pending_gradients(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.update(32.0)
    assert one.grad == 96.0
    scaler.step(one.optimizer)
    assert one.value == -3.0


@pytest.mark.parametrize("scaler_class", [GradScaler, STOCK])
def test_loading_a_state_converts_pending_gradients(weights, scaler_class):
    one = weights()
    scaler = fresh(scaler_class, one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    scaler.step(one.optimizer)
    assert one.value == (-3.0 if scaler_class is GradScaler else -0.75)


def test_an_overflow_by_rescaling_skips_the_step(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    scaler.scale(one.loss(1e30)).backward()
    scaler.update(2.0**60)
    assert one.grad == float("inf")
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).skipped
    assert one.value == 0.0


def test_rescaling_to_another_than_a_power_of_two_is_right_to_an_ulp():
    torch.manual_seed(0)
    start = torch.randn(1000)
    param = torch.nn.Parameter(torch.zeros(1000))
    scaler = GradScaler("cpu", init_scale=3.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.register(optimizer)
    scaler.scale((param * start).sum()).backward()
    scaler.update(7.0)
    scaler.ensure_unscaled(optimizer)
    assert torch.allclose(param.grad, start, rtol=4e-7, atol=0)


def test_fp16_gradients_are_not_rescaled_the_update_waits():
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    full = torch.nn.Parameter(torch.zeros(4))
    a, b = torch.optim.SGD([full], lr=1.0), torch.optim.SGD([half], lr=1.0)
    scaler = fresh(GradScaler, a, b, fp16_gradients=True)
    scaler.scale((full * 3.0).sum() + (half * 5.0).sum()).backward()
    scaler.step(a)
    scaler.update()
    scaler.end_iteration()
    assert (scaler.get_scale(), half.grad[0].item()) == (8.0, 40.0)
    scaler.step(b)
    scaler.end_iteration()
    assert (scaler.get_scale(), half[0].item()) == (16.0, -5.0)


def test_fp16_gradients_are_not_converted_by_hand_either():
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([half], lr=1.0)
    scaler = fresh(GradScaler, optimizer, fp16_gradients=True)
    scaler.scale((half * 5.0).sum()).backward()
    state = scaler.state_dict()
    for call in (lambda: scaler.update(2.0), lambda: scaler.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="float16 gradient of parameter 'group 0\\[0\\]'.*zero_grad"):
            call()
    scaler.step(optimizer)
    scaler.update(2.0)
    assert (scaler.get_scale(), half[0].item()) == (2.0, -5.0)


# -- one scale per loss -----------------------------------------------------------------------------


def test_each_loss_has_its_scale(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer, losses=("penalty",), growth_interval=100)
    for _ in range(2):
        one.optimizer.zero_grad()
        scaler.scale(one.loss(3.0)).backward()
        scaler.scale(one.loss(0.5), name="penalty").backward()
        scaler.step(one.optimizer)
        scaler.update()
    assert one.value == -7.0
    with pytest.raises(
        ValueError, match="loss 'other' is not known; the constructor's losses= named: penalty"
    ):
        scaler.scale(one.loss(), name="other")


def test_an_overflow_backs_off_the_scale_of_its_loss_only(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer, losses=("penalty",), growth_interval=100)
    scaler.scale(one.loss(3.0)).backward()
    scaler.scale(one.loss(float("inf")), name="penalty").backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert one.value == 0.0
    assert (scaler.get_scale(), scaler.get_scale("penalty")) == (8.0, 4.0)


@pytest.mark.parametrize("how", ["sum", "list"])
def test_one_backward_for_two_scales_is_refused(weights, how):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer, losses=("penalty",))
    losses = scaler.scale(one.loss(3.0)), scaler.scale(one.loss(4.0), name="penalty")
    with pytest.raises(
        RuntimeError, match="two losses with scales of their own.*call backward\\(\\) on each"
    ):
        sum(losses).backward() if how == "sum" else torch.autograd.backward(losses)


def test_one_backward_for_two_losses_of_one_scale(weights):
    one = weights()
    scaler = fresh(GradScaler, one.optimizer)
    torch.autograd.backward([scaler.scale(one.loss(3.0)), scaler.scale(one.loss(4.0))])
    scaler.step(one.optimizer)
    assert one.value == -7.0


def test_one_scale_per_optimizer(weights):
    d, g = weights(), weights()
    scaler = fresh(GradScaler, d.optimizer, g.optimizer, losses=("d", "g"), growth_interval=100)
    for _ in range(2):
        d.optimizer.zero_grad()
        scaler.scale(d.loss(float("inf")), name="d").backward()
        scaler.step(d.optimizer)
        scaler.update()
        g.optimizer.zero_grad()
        scaler.scale(g.loss(2.0), name="g").backward()
        scaler.step(g.optimizer)
        scaler.update()
    assert (d.value, g.value) == (0.0, -4.0)
    assert (scaler.get_scale("d"), scaler.get_scale("g")) == (2.0, 8.0)
