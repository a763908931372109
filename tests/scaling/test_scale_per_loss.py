"""One loss scale per loss."""

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import fresh


def test_each_loss_has_its_scale(weights):
    one = weights()
    scaler = fresh(one.optimizer, losses=("penalty",), growth_interval=100)
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
    scaler = fresh(one.optimizer, losses=("penalty",), growth_interval=100)
    scaler.scale(one.loss(3.0)).backward()
    scaler.scale(one.loss(float("inf")), name="penalty").backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert one.value == 0.0
    assert (scaler.get_scale(), scaler.get_scale("penalty")) == (8.0, 4.0)


@pytest.mark.parametrize("how", ["sum", "list"])
def test_one_backward_for_two_scales_is_refused(weights, how):
    one = weights()
    scaler = fresh(one.optimizer, losses=("penalty",))
    losses = scaler.scale(one.loss(3.0)), scaler.scale(one.loss(4.0), name="penalty")
    with pytest.raises(
        RuntimeError, match="two losses with scales of their own.*call backward\\(\\) on each"
    ):
        sum(losses).backward() if how == "sum" else torch.autograd.backward(losses)


@pytest.mark.parametrize("names", ["abc", ["a", "a"]])
def test_names_of_losses_are_a_list_without_repeats(names):
    with pytest.raises(ValueError, match=r"losses=.* is not allowed; give a list of different names"):
        GradScaler("cpu", losses=names)
