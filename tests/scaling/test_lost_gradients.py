"""Gradients that are dropped, written over, or taken away by hooks: which overflows still count, what is refused."""

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


class TakesGradients(torch.optim.SGD):
    """Takes each gradient away as soon as it is there, as optimizers that offload to the CPU do."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


DROPS = {
    "dropped": lambda param: setattr(param, "grad", None),
    "zeroed": lambda param: param.grad.zero_(),
    "mended": lambda param: param.grad.nan_to_num_(0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("order", list(itertools.permutations(("drop", "update", "backward"))), ids="-".join)
@pytest.mark.parametrize("drop", DROPS)
def test_one_dropped_gradient_drops_no_batch(order, drop, fused):
    """Whatever comes between: the other gradient still holds what the overflowed backward brought."""
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


@pytest.mark.parametrize("splits", [False, True])
def test_gradients_that_a_hook_has_taken_away_are_refused(weights, splits):
    one = weights(count=2, optimizer=TakesGradients)
    scaler = fresh(one.optimizer)
    one.backward(scaler)
    if splits:  # another owner
        scaler.register(torch.optim.SGD(one.params[1:], lr=1.0))
    with pytest.raises(RuntimeError, match=r"a hook took .*param_groups\[0\]\['params'\]\[\d\]\" away"):
        scaler.step(one.optimizer)
    assert one.value == 0.0


def test_hooks_that_leave_gradients_alone_are_no_error(weights):
    one, other = weights(), weights()
    for param in one.params:
        param.register_post_accumulate_grad_hook(lambda param: None)
    scaler = fresh(one.optimizer, other.optimizer)
    one.train(scaler, 2.0, 2.0)
    one.optimizer.zero_grad()
    other.backward(scaler, 2.0)
    scaler.step(one.optimizer)  # not reached: steps as it would without a scaler
    scaler.step(other.optimizer)
    scaler.update()
    assert (one.value, other.value) == (-4.0, -2.0)
    one.backward(scaler, 2.0)
    one.optimizer.zero_grad()
    scaler.step(one.optimizer)  # a dropped batch: as without a scaler
    scaler.update()
    for param in one.params:
        param.requires_grad_(False)
    scaler.scale(other.loss(2.0)).backward()
    scaler.step(one.optimizer)
    assert one.value == -4.0


@pytest.mark.parametrize("late", [False, True])
def test_an_overflow_written_over_counts_for_each_owner(weights, fused, late):
    """Also for one that the scaler gets to know afterwards, and its parameters are known apart from then on."""
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
