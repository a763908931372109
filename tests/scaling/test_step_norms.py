"""A result has two norms: the one before the first clip, and that of the gradients which the step used."""

import math

import pytest
import torch

from tests.scaling.runs import scaler_of

CLIPS = {
    "optimizer": lambda scaler, optimizers, params, limit: scaler.clip_grad_norm_(optimizers[0], limit),
    "params": lambda scaler, optimizers, params, limit: scaler.clip_grad_norm_(params[:2], limit),
    "all params": lambda scaler, optimizers, params, limit: scaler.clip_grad_norm_(params, limit),
    "value": lambda scaler, optimizers, params, limit: scaler.clip_grad_value_(
        optimizers[0], limit / math.sqrt(2)
    ),
}
"""Ways to clip; the gradients of ``params`` are 3, 4 and 0, the last one is another optimizer's."""


def window(scale, **options):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [torch.optim.SGD(params[:2], lr=1.0), torch.optim.SGD(params[2:], lr=1.0)]
    scaler = scaler_of(scale, **options)
    scaler.register(*optimizers)
    scaler.scale(3.0 * params[0].sum() + 4.0 * params[1].sum() + 0.0 * params[2].sum()).backward()
    return scaler, optimizers, params


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("limits", [(0.5,), (2.0, 0.5), (2.0, 100.0), (100.0, 0.5)])
@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize("in_step", [False, True])
def test_the_norm_is_from_before_the_first_clip(scale, in_step, how, limits, one_pass):
    scaler, optimizers, params = window(scale, one_pass=one_pass)
    for limit in limits[: len(limits) - in_step]:
        CLIPS[how](scaler, optimizers, params, limit)
    if in_step:
        scaler.clip_and_step(optimizers[0], limits[-1])
    else:
        scaler.step(optimizers[0])
    result, used = (
        scaler.last_step(optimizers[0]),
        torch.cat([param.grad for param in params[:2]]).norm().item(),
    )
    assert result.norm.item() == pytest.approx(5.0)
    assert result.clipped_norm.item() == pytest.approx(used)
    assert used == pytest.approx(min(limits), rel=1e-5)


@pytest.mark.parametrize("one_pass", [True, False])
def test_a_window_that_was_dropped_has_left_no_norm(scale, one_pass):
    scaler, (sgd, _), params = window(scale, one_pass=one_pass)
    for factor in (1.0, 2.0):
        sgd.zero_grad(set_to_none=factor == 2.0)
        scaler.scale(factor * (3.0 * params[0].sum() + 4.0 * params[1].sum())).backward()
        scaler.clip_grad_norm_(sgd, 1.0)
    scaler.step(sgd)
    assert scaler.last_step(sgd).norm.item() == pytest.approx(10.0)


@pytest.mark.parametrize("in_step", [False, True])
def test_both_norms_are_of_the_order_of_the_clip(scale, in_step):
    scaler, (sgd, _), _ = window(scale)
    if in_step:
        result = scaler.clip_and_step(sgd, 2.0, 1.0)
    else:
        scaler.clip_grad_norm_(sgd, 2.0, 1.0)
        scaler.step(sgd)
        result = scaler.last_step(sgd)
    assert [result.norm.item(), result.clipped_norm.item()] == pytest.approx([7.0, 2.0], rel=1e-5)
