"""Invariant 1: a gradient is divided once, by exactly the scale that its loss was multiplied by.

Each scenario also runs on torch's scaler, which gives a wrong result. That shows that the scenario can fail.
``a3`` is a loss whose gradient for model a is 3.
"""

import math
from functools import partial

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.kernels.build import native_core
from tests.scaling.runs import fresh

SCENARIOS = {
    # The scale grows between the two steps, as it does in both stock adapters.
    "update after each optimizer": ("backward a3 b5, step a, update, step b, update", (-3, -5)),
    # The scale backs off between the two steps. The second step is still taken, which is right.
    "overflow in the first": ("backward a3 b5, spoil a, step a, update, step b, update", (0, -5)),
    # Accelerate's clip_grad_norm_ unscales all optimizers, but the first update() forgets that.
    "clip both, update each": ("backward a3 b5, unscale_ a b, step a, update, step b, update", (-3, -5)),
    # One optimizer steps after each micro-batch, the other after every second one. Its window spans an
    # update.
    "cadences": ("backward a3 b5, step a, update, zero a, backward a3 b5, step a b, update", (-6, -10)),
    # As with n_critic in a GAN: the same optimizer steps again before update().
    "critic": ("backward a3, step a, zero a, backward a3, step a, backward b1, step b, update", (-6, -1)),
    # Two optimizers step the same parameters: the first one unscales them in place.
    "shared parameters": ("backward a3, step a same, update", (-6, 0)),
    # Gradients are unscaled in the middle of an accumulation window, as when Accelerate clips each
    # micro-batch.
    "unscale in mid-window": ("backward a3, unscale_ a, backward a4, step a, update", (-7, 0)),
    "unscale each micro-batch": ("backward a3, unscale_ a, backward a4, unscale_ a, step a", (-7, 0)),
    # Both losses are scaled first. Then the two backward passes run, with an unscale_ between them.
    "losses scaled early": ("scale a3, scale a4, early, unscale_ a, early, step a", (-7, 0)),
    # A loss is scaled, the scale changes, and only then its backward runs.
    "scaled before update": ("backward a1, scale a3, step a, update, zero a, early, step a", (-4, 0)),
    # Each step adds to the gradient that the last one left, as hand-written momentum does: 3, then 3 + 4.
    "never zeroed": ("backward a3, step a, update, backward a4, step a, update", (-10, 0)),
    # An optimizer is unscaled but not stepped. It steps after update().
    "update without a step": ("backward a3, unscale_ a, update, step a", (-3, 0)),
}
ALL = pytest.mark.parametrize(("script", "right"), SCENARIOS.values(), ids=SCENARIOS)
OPTIONS = {"init_scale": 8.0, "growth_interval": 1}


def play(script, scaler, weights):
    """Run a script with two models. Return their values or the error."""
    models = {"a": weights(), "b": weights(), "same": weights()}
    models["same"].optimizer = torch.optim.SGD(models["a"].params, lr=1.0)
    if isinstance(scaler, GradScaler):
        scaler.register(*(model.optimizer for name, model in models.items() if f" {name}" in script))
    early = []

    def scaled(terms):
        return scaler.scale(sum(models[term[0]].loss(float(term[1])) for term in terms))

    calls = {
        "backward": lambda *terms: scaled(terms).backward(),
        "scale": lambda *terms: early.append(scaled(terms)),
        "early": lambda: early.pop(0).backward(),
        "zero": lambda name: models[name].optimizer.zero_grad(),
        "spoil": lambda name: models[name].params[0].grad[0].fill_(float("inf")),
        "update": scaler.update,
        "unscale_": lambda *names: [scaler.unscale_(models[name].optimizer) for name in names],
        "step": lambda *names: [scaler.step(models[name].optimizer) for name in names],
    }
    try:
        for command in script.split(", "):
            verb, *words = command.split()
            calls[verb](*words)
        return models["a"].value, models["b"].value
    except (AssertionError, RuntimeError) as error:
        return str(error)


@ALL
def test_gradients_are_unscaled_once(script, right, fused, weights):
    assert play(script, GradScaler("cpu", **OPTIONS), partial(weights, fused=fused)) == right


@ALL
def test_torch_gets_them_wrong(script, right, weights):
    assert play(script, torch.amp.GradScaler("cpu", **OPTIONS), weights) != right


def test_another_losss_backward_leaves_unscaled_gradients_unscaled(weights):
    d, g = weights(), weights()
    scaler = fresh(d.optimizer, g.optimizer)
    d.backward(scaler, 3.0)
    scaler.unscale_(d.optimizer)
    g.backward(scaler, 5.0)
    assert (d.grad, g.grad) == (3.0, 40.0)


def test_a_loss_multiplied_by_hand(weights):
    """The scaler cannot see that backward pass. It assumes, like torch, that new gradients are scaled."""
    one = weights()
    scaler = fresh(one.optimizer, growth_interval=100)
    scaler.scale(torch.ones(()))
    for set_to_none in (True, True, False, False):
        one.optimizer.zero_grad(set_to_none=set_to_none)
        (one.loss(3.0) * scaler.get_scale()).backward()
        scaler.step(one.optimizer)
        assert scaler.last_step(one.optimizer).one_pass or not native_core().loaded
        scaler.update()
    assert one.value == -12.0


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_an_update_ends_a_batch_that_was_unscaled_and_not_stepped_with(weights, make):
    """An overflow in that batch does not skip the next one, although the scaler sees no backward pass of the
    next one.
    """
    one, scaler = weights(), make("cpu", init_scale=8.0)
    one.backward(scaler, math.inf)
    scaler.unscale_(one.optimizer)
    scaler.update()
    one.optimizer.zero_grad()
    (one.loss(3.0) * scaler.get_scale()).backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert (one.value, scaler.get_scale()) == (-3.0, 4.0)


def test_parameters_added_later(weights):
    one = weights()
    scaler = fresh(one.optimizer)
    one.backward(scaler, 3.0)
    scaler.unscale_(one.optimizer)
    extra = torch.nn.Parameter(torch.zeros(4))
    one.optimizer.add_param_group({"params": [extra]})
    one.params.append(extra)
    (extra * 3.0 * 8.0).sum().backward()
    scaler.step(one.optimizer)
    assert one.value == -3.0


@pytest.mark.parametrize("how", [lambda losses: sum(losses).backward(), torch.autograd.backward])
def test_one_backward_for_two_scales_is_refused(weights, how):
    one = weights()
    scaler = fresh(one.optimizer, losses=("penalty",))
    losses = scaler.scale(one.loss(3.0)), scaler.scale(one.loss(4.0), name="penalty")
    with pytest.raises(RuntimeError, match="two losses with .* of their own.*call backward\\(\\) on each"):
        how(losses)


def test_a_scale_that_no_gradient_carries_is_not_checked():
    unused, used, waiting = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer, idle = (torch.optim.SGD(params, lr=1.0) for params in ([unused, used], [waiting]))
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, losses=["other"])
    scaler.register(optimizer, idle)
    scaler.scale(used.sum()).backward()
    scaler.step(optimizer)
    scaler.scale(used.sum(), name="other").backward()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.update()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("first", [0, 1])
def test_an_overflow_of_another_loss_counts_whichever_of_two_optimizers_of_a_weight_steps(first):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for _ in range(2)]
    scaler = GradScaler("cpu", init_scale=8.0, losses=["other"])
    scaler.register(*optimizers)
    scaler.scale((weight * math.inf).sum(), name="other").backward()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizers[first])
    scaler.update()
    assert scaler.get_scale("other") == 4.0


def test_an_overflow_counts_although_a_later_pass_of_its_loss_did_not_reach_the_weight():
    weight, elsewhere = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, losses=["first", "second"])
    scaler.register(optimizer)
    scaler.scale((weight * math.inf).sum(), name="first").backward()
    scaler.scale(elsewhere.sum(), name="first").backward()
    scaler.scale(weight.sum(), name="second").backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale("first") == scaler.get_scale("second") == 4.0


@pytest.mark.parametrize("names", ["abc", ["a", "a"]])
def test_names_of_losses_are_a_list_without_repeats(names):
    with pytest.raises(ValueError, match=r"losses=.* is not allowed; give a list of different names"):
        GradScaler("cpu", losses=names)


def test_an_unknown_loss_is_refused(weights):
    with pytest.raises(ValueError, match="loss 'other' is not known; .*losses= named: penalty"):
        GradScaler("cpu", losses=["penalty"]).scale(weights().loss(), name="other")
