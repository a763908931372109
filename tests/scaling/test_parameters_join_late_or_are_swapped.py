"""Are steps right if parameters join late or are swapped, or if gradients change between two calls?"""

import copy
import math

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling.optimizer_state import OptimizerState
from tests.scaling.runs import fresh, scaler_of

EDITS = {
    "data": lambda grad: grad.data.mul_(100),
    "numpy": lambda grad: grad.numpy().__imul__(100),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("whole", [True, False], ids=["optimizer", "params"])
def test_gradients_are_read_again_after_user_code(weights, edit, whole):
    """Writes by .data and NumPy do not change version counters.

    With the old norm, a step of length 100 would be taken.
    """
    one, scaler = weights(count=1), GradScaler("cpu", init_scale=8.0)
    one.backward(scaler, 3.0)
    scaler.unscale_(one.optimizer)
    EDITS[edit](one.params[0].grad)
    norm = scaler.clip_grad_norm_(one.optimizer if whole else one.params, 1.0)
    assert norm.item() == pytest.approx(600.0)
    scaler.step(one.optimizer)
    assert one.params[0].norm().item() == pytest.approx(1.0)


def sgds(*param_lists):
    return [torch.optim.SGD(params, lr=1.0) for params in param_lists]


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_that_joins_before_anothers_update(weights, late):
    """It joins before or after the backward pass. In both cases its gradient carries that pass's scale."""
    one, other, second = weights(count=1), weights(), torch.nn.Parameter(torch.zeros(4))
    scaler = fresh(one.optimizer, other.optimizer)
    if not late:
        one.optimizer.add_param_group({"params": [second]})
    scaler.scale(one.loss(3.0) * late + 3.0 * second.sum() + other.loss(3.0)).backward()
    if late:
        one.optimizer.add_param_group({"params": [second]})
    scaler.step(other.optimizer)
    scaler.update()
    scaler.scale(other.loss(3.0)).backward()
    scaler.step(other.optimizer)
    scaler.update()
    scaler.step(one.optimizer)
    assert (one.value, second[0].item()) == (-3.0 * late, -3.0)


def test_a_parameter_that_joins_between_two_backwards_at_other_scales(weights):
    one, second = weights(count=1), torch.nn.Parameter(torch.zeros(4))
    scaler = fresh(one.optimizer)
    scaler.scale(one.loss(1.0) + 3.0 * second.sum()).backward()
    scaler.step(one.optimizer)
    scaler.update()
    one.optimizer.add_param_group({"params": [second]})
    scaler.scale(one.loss(1.0) + 4.0 * second.sum()).backward()
    scaler.step(one.optimizer)
    assert second[0].item() == -7.0


def test_gradients_left_over_from_before_any_scaling_with_named_losses(weights):
    one = weights()
    one.loss(2.0).backward()
    scaler = fresh(one.optimizer, losses=("a",))
    scaler.scale(one.loss(1.0), name="a").backward()
    scaler.step(one.optimizer)
    assert one.value == -3.0


def test_lazy_parameters_may_be_registered():
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(1))
    (optimizer,), scaler = sgds(model.parameters()), GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer, names=model)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    assert model[1].bias.item() == pytest.approx(before["1.bias"].item() - 2.0)


def test_parameters_may_be_swapped_under_a_scaler():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = torch.nn.Linear(3, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), GradScaler("cpu")
        scaler.register(optimizer, names=model)
        for dtype in (torch.float64, torch.float32):
            scaler.scale(model(torch.ones(1, 3, dtype=model.weight.dtype)).sum()).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            model.to(dtype)
            assert model.weight.dtype is dtype
            model.load_state_dict(model.state_dict())
            optimizer.zero_grad()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_an_update_after_each_optimizer_asks_few_others(monkeypatch):
    """There are 300 optimizers with an update() after each. This once took quadratic time."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(60)]
    optimizers, asked, is_pending = sgds(*([param] for param in params)), [], OptimizerState.delays_update
    scaler = fresh(*optimizers)
    monkeypatch.setattr(
        OptimizerState,
        "delays_update",
        lambda state, **options: asked.append(state) or is_pending(state, **options),
    )
    scaler.scale(sum(params).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert len(asked) < 4 * len(optimizers)
    assert all(param.item() == -1.0 for param in params)


class Wrapper(torch.optim.Optimizer):
    """A wrapper such as Lookahead.

    It shares another optimizer's groups and does not call ``Optimizer.__init__``.
    """

    def __init__(self, inner):
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}
        self.step, self.zero_grad = inner.step, inner.zero_grad


def test_a_wrapper_that_never_called_the_constructor_of_optimizers(weights, scale):
    one = weights()
    one.optimizer = Wrapper(one.optimizer)
    one.train(scaler_of(scale), 1.0, math.inf, 2.0)
    assert one.value == -3.0
