"""Faults that hard use found in release 0.1: numbers that were wrong without a word, errors that were none."""

import copy
import math

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling.per_optimizer import PerOptimizerState


def edit_data(grad):
    grad.data.mul_(100)


def edit_numpy(grad):
    grad.numpy()[:] *= 100


def edit_in_place(grad):
    grad.mul_(100)


EDITS = [edit_data, edit_numpy, edit_in_place]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("how", ["optimizer", "params"])
def test_gradients_are_read_again_after_user_code(weights, edit, how):
    """No version counter tells of .data and numpy: the old norm let a step of length 100 through."""
    one = weights(count=1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(3.0)).backward()
    scaler.unscale_(one.optimizer)
    edit(one.params[0].grad)
    norm = scaler.clip_grad_norm_(one.optimizer if how == "optimizer" else one.params, 1.0)
    assert norm.item() == pytest.approx(600.0)
    scaler.step(one.optimizer)
    assert one.params[0].norm().item() == pytest.approx(1.0)


def test_what_needs_a_small_scale_trains_as_under_torch():
    """A floor of 1 skipped every step of a loss whose gradients fit float16 only below it."""
    losses = {}
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([param], lr=1e-9)
        scaler = cls("cpu")
        taken = 0
        for _ in range(60):
            optimizer.zero_grad()
            half = param.half() * 2.0**14
            scaler.scale((half.float() * 2.0**10).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            taken += param[0].item() != 0
        losses[cls] = (param.detach().clone(), scaler.get_scale(), taken)
    assert losses[GradScaler][1:] == losses[torch.amp.GradScaler][1:]
    assert torch.equal(losses[GradScaler][0], losses[torch.amp.GradScaler][0])
    assert losses[GradScaler][2] > 0


def test_a_loaded_scale_below_one_backs_off(weights):
    one = weights()
    scaler = GradScaler("cpu")
    scaler.load_state_dict(
        {
            "scale": 0.25,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }
    )
    scaler.scale(one.loss(math.inf)).backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.125


def two_optimizers():
    """The first steps one of two parameters, the second another."""
    first = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    other = torch.nn.Parameter(torch.zeros(4))
    one = torch.optim.SGD(first[:1], lr=1.0)
    two = torch.optim.SGD([other], lr=1.0)
    return first, other, one, two


def test_a_parameter_that_joins_before_anothers_update():
    first, other, one, two = two_optimizers()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.register(one, two)
    one.add_param_group({"params": [first[1]]})
    scaler.scale((3.0 * (first[0] + first[1] + other)).sum()).backward()
    scaler.step(two)
    scaler.update()
    scaler.scale((3.0 * other).sum()).backward()
    scaler.step(two)
    scaler.update()
    scaler.step(one)
    assert [param[0].item() for param in first] == [-3.0, -3.0]


def test_splitting_a_set_keeps_what_was_known():
    """A shared parameter's owner joins after another has stepped: it was unscaled a second time."""
    shared, own = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    one, two = torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([own], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one, two)
    scaler.scale((2.0 * (shared + own)).sum()).backward()
    scaler.step(one)
    two.add_param_group({"params": [shared]})
    scaler.step(two)
    scaler.update()
    assert (shared[0].item(), own[0].item()) == (-4.0, -2.0)


def test_a_scale_set_by_hand_is_told_to_results(weights):
    one = weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(2.0)).backward()
    scaler.step(one.optimizer)
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(math.nan)
    scaler.update(4.0)
    assert (scaler.last_step(one.optimizer).scale_before, scaler.last_step(one.optimizer).scale_after) == (
        8,
        4,
    )


def test_gradients_left_over_from_before_any_scaling_with_named_losses(weights):
    one = weights()
    one.loss(2.0).backward()
    scaler = GradScaler("cpu", init_scale=8.0, losses=("a",))
    scaler.register(one.optimizer)
    scaler.scale(one.loss(1.0), name="a").backward()
    scaler.step(one.optimizer)
    assert one.value == -3.0


def test_lazy_parameters_may_be_registered():
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer, names=model)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before["1.bias"], model[1].bias)
    assert model[1].bias.item() == pytest.approx(before["1.bias"].item() - 2.0)


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_parameters_may_be_swapped_under_a_scaler(keep_gradients):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = GradScaler("cpu")
        scaler.register(optimizer, names=model)
        for dtype in (torch.float64, torch.float32):
            scaler.scale(model(torch.ones(1, 3, dtype=model.weight.dtype)).sum()).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            if not keep_gradients:
                optimizer.zero_grad()
            model.to(dtype)
            assert model.weight.dtype is dtype
            model.load_state_dict(model.state_dict())
            optimizer.zero_grad()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_an_update_after_each_optimizer_asks_few_others(monkeypatch):
    """300 optimizers with an update() each: the work was quadratic."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(60)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(*optimizers)
    asked = []
    is_pending = PerOptimizerState.is_pending

    def counted(state):
        asked.append(state)
        return is_pending(state)

    monkeypatch.setattr(PerOptimizerState, "is_pending", counted)
    scaler.scale(sum(params).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert len(asked) < 4 * len(optimizers)
    assert all(param.item() == -1.0 for param in params)


class Wrapper(torch.optim.Optimizer):
    """Lookahead and its like: another optimizer's groups, and no ``Optimizer.__init__``."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_wrapper_that_never_called_the_constructor_of_optimizers(enabled):
    def weights_after(scaler):
        param = torch.nn.Parameter(torch.ones(3))
        wrapper = Wrapper(torch.optim.SGD([param], lr=0.1))
        for factor in (1.0, math.inf, 2.0) if enabled else (1.0, 2.0):
            wrapper.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(wrapper)
            scaler.update()
        return param.detach()

    ours = weights_after(GradScaler("cpu", enabled=enabled, init_scale=4.0))
    assert torch.equal(ours, weights_after(torch.amp.GradScaler("cpu", enabled=enabled, init_scale=4.0)))
