"""Gradients that are dropped, written over, or taken away by hooks: which overflows still count, what is refused."""

import itertools
import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.fuzz.prelude import TakesGradients


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_a_dropped_batch_takes_its_overflow_along(weights, fused, update):
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(math.inf)).backward()
    scaler.unscale_(one.optimizer)
    one.optimizer.zero_grad(set_to_none=False)
    if update:
        scaler.update()
        assert scaler.get_scale() == 4.0
    scaler.scale(one.loss(2.0)).backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert not scaler.last_step(one.optimizer).skipped
    assert not scaler.last_step(one.optimizer).overflow_report()
    assert (one.value, scaler.get_scale()) == (-2.0, 4.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_zeros_over_one_overflowed_gradient_drop_no_batch(fused, update):
    """The others' gradients are of the same backward: the step stays skipped, as after clipping by value."""
    overflowed, good = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([overflowed, good], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer)
    scaler.scale((overflowed * math.inf + 3.0 * good).sum()).backward()
    scaler.ensure_unscaled(optimizer)
    overflowed.grad.nan_to_num_(0.0, 0.0, 0.0)
    if update:
        scaler.update()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped
    assert torch.equal(good, torch.ones(2))


@pytest.mark.parametrize("order", list(itertools.permutations(("drop", "update", "backward"))), ids="-".join)
@pytest.mark.parametrize("zeroed", [False, True])
def test_one_dropped_gradient_drops_no_batch(order, zeroed):
    """Whatever comes between: the other gradient still holds what the overflowed backward brought."""
    overflowed, good = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([overflowed, good], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(optimizer)
    scaler.scale((overflowed * math.inf + 3.0 * good).sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1e9)
    calls = {
        "drop": lambda: overflowed.grad.zero_() if zeroed else setattr(overflowed, "grad", None),
        "update": scaler.update,
        "backward": lambda: scaler.scale(good.sum()).backward(),
    }
    for name in order:
        calls[name]()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped
    assert torch.equal(good, torch.ones(2))


def test_an_overflow_written_over_still_counts_after_another_backward(weights):
    one = weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(math.inf)).backward()
    scaler.clip_grad_value_(one.optimizer, 1.0)
    scaler.scale(one.loss(2.0)).backward()
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).skipped
    assert scaler.last_step(one.optimizer).overflow_report().inf == tuple(
        f"param_groups[0]['params'][{i}]" for i in range(3)
    )


def test_gradients_that_a_hook_has_taken_away_are_refused(weights):
    one = weights(count=1, optimizer=TakesGradients)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.register(one.optimizer)
    scaler.scale(one.loss(1.0)).backward()
    with pytest.raises(
        RuntimeError,
        match=r"a hook took the gradient of \"param_groups\[0\]\['params'\]\[0\]\" away during backward",
    ):
        scaler.step(one.optimizer)
    assert one.value == 0.0


def test_gradients_taken_away_are_known_after_parameters_got_another_owner(weights):
    one = weights(count=2, optimizer=TakesGradients)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.register(one.optimizer)
    scaler.scale(one.loss(1.0)).backward()
    scaler.register(torch.optim.SGD(one.params[1:], lr=1.0))
    with pytest.raises(
        RuntimeError, match=r"a hook took the gradient of \"param_groups\[0\]\['params'\]\[0\]\" away"
    ):
        scaler.step(one.optimizer)


def test_hooks_that_leave_gradients_alone_are_no_error(weights):
    one, other = weights(), weights()
    for param in one.params:
        param.register_post_accumulate_grad_hook(lambda param: None)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one.optimizer, other.optimizer)
    for _ in range(2):
        one.optimizer.zero_grad()
        scaler.scale(one.loss(2.0)).backward()
        scaler.step(one.optimizer)
        scaler.update()
    one.optimizer.zero_grad()
    scaler.scale(other.loss(2.0)).backward()
    scaler.step(one.optimizer)  # not reached: steps as it would without a scaler
    scaler.step(other.optimizer)
    scaler.update()
    assert (one.value, other.value) == (-4.0, -2.0)
    scaler.scale(one.loss(2.0)).backward()
    one.optimizer.zero_grad()
    scaler.step(one.optimizer)  # a dropped batch: as without a scaler
    scaler.update()
    for param in one.params:
        param.requires_grad_(False)
    scaler.scale(other.loss(2.0)).backward()
    scaler.step(one.optimizer)
    assert one.value == -4.0


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_written_over_counts_for_each_owner(fused):
    shared = torch.nn.Parameter(torch.zeros(4))
    one, two = (torch.optim.SGD([shared], lr=1.0, fused=fused) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one, two)
    scaler.scale((math.inf * shared).sum()).backward()
    scaler.clip_grad_value_(one, 1.0)
    for optimizer in (one, two):
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).skipped
    scaler.update()
    one.zero_grad()
    scaler.scale((2.0 * shared).sum()).backward()
    scaler.step(one)
    scaler.step(two)
    assert shared[0].item() == -4.0
