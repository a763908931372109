"""The scale follows torch's rule, extended by a floor, a ceiling and three kinds of hysteresis."""

import math
import random

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.options import LossScaleOptions
from amp_plugin.scaling.loss_scale import LossScale


def dynamic(init_scale=2.0**16, **options):
    return LossScale(LossScaleOptions(init_scale=init_scale, **options))


def run(scale, overflows):
    """Apply a sequence of overflows (True) and good steps (False). Return the scale after each."""
    scale.materialize("cpu")
    history = []
    for overflow in overflows:
        scale.record(torch.tensor(float(overflow)))
        scale.update_()
        history.append(scale.item())
    return history


class Apex:
    """apex's update_scale_hysteresis kernel, written with Python floats."""

    def __init__(self, scale, interval, hysteresis, floor):
        self.scale, self.interval, self.hysteresis, self.floor = scale, interval, hysteresis, floor
        self.tracker, self.left, self.step, self.last = 0, hysteresis, 0, -1

    def lower(self):
        self.scale = max(self.scale * 0.5, self.floor)

    def update(self, overflow):
        if overflow:
            self.tracker, self.left = 0, self.left - 1
            if self.left <= 0:
                self.lower()
            return
        self.tracker, self.left = self.tracker + 1, self.hysteresis
        if self.tracker == self.interval:
            self.scale, self.tracker = self.scale * 2, 0


class Megatron(Apex):
    """Megatron-LM's DynamicGradScaler."""

    def update(self, overflow):
        left = self.left
        super().update(overflow)
        if not overflow and self.tracker:
            self.left = left  # only growth restores the hysteresis


class DeepSpeed(Apex):
    """DeepSpeed's DynamicLossScaler with consecutive_hysteresis=False."""

    def update(self, overflow):
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                self.lower()
            else:
                self.left -= 1
            self.last = self.step
        elif (self.step - self.last) % self.interval == 0:
            self.left, self.scale = self.hysteresis, self.scale * 2
        self.step += 1


@pytest.mark.parametrize(
    ("mode", "model"), [("apex", Apex), ("megatron", Megatron), ("deepspeed", DeepSpeed)]
)
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_hysteresis_as_published(mode, model, hysteresis, seed):
    chance = random.Random(seed)
    overflows = [chance.random() < 0.4 for _ in range(200)]
    ours = dynamic(2.0**16, growth_interval=4, min_scale=0.25, hysteresis=hysteresis, hysteresis_mode=mode)
    theirs = model(2.0**16, 4, hysteresis, 0.25)
    expected = []
    for overflow in overflows:
        theirs.update(overflow)
        expected.append(theirs.scale)
    assert run(ours, overflows) == expected


def test_floor_and_ceiling():
    assert run(dynamic(8.0, min_scale=3.0), [True] * 3) == [4.0, 3.0, 3.0]
    assert run(dynamic(8.0, growth_interval=1, max_scale=20.0), [False] * 3) == [16.0, 20.0, 20.0]
    smallest = torch.finfo(torch.float32).tiny
    assert run(dynamic(0.5), [True]) == [0.25], "the default floor only keeps the scale above 0"
    overflows = run(dynamic(4 * smallest, growth_interval=1), [True] * 4 + [False])
    assert overflows[1:] == [smallest] * 3 + [2 * smallest], "torch's becomes 0 and stays there"
    largest = 2.0**127
    assert run(dynamic(largest, growth_interval=1), [False]) == [largest], "never infinite"


def test_a_scale_set_beyond_the_limits_is_not_forced_back():
    scale = dynamic(8.0, min_scale=4.0, max_scale=16.0, growth_interval=1)
    scale.materialize("cpu")
    scale.fill_(2.0)
    assert run(scale, [True]) == [2.0]
    scale.fill_(64.0)
    assert run(scale, [False]) == [64.0]


def test_a_lowered_interval_takes_effect():
    """torch compares with ==, so it never reaches an interval that it has already passed."""
    scale = dynamic(8.0, growth_interval=100)
    run(scale, [False] * 25)
    scale.growth_interval = 3
    assert run(scale, [False]) == [16.0]


def test_at_the_floor(weights, fused):
    """By default the scaler warns once.

    With on_min_scale="raise", each overflow at the floor raises an error.
    """
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0, min_scale=1.0)
    one.train(scaler, math.inf)
    with pytest.warns(UserWarning, match="loss scale is at min_scale.*on_min_scale='raise' ends the run"):
        one.train(scaler, math.inf)
    one.train(scaler, math.inf)
    assert scaler.get_scale() == 1.0
    scaler = GradScaler("cpu", init_scale=2.0, min_scale=1.0, on_min_scale="raise")
    one.train(scaler, math.inf)
    with pytest.raises(FloatingPointError, match="loss scale is at min_scale.*overflow_report"):
        one.train(scaler, math.inf)


def test_the_inverse_has_the_bits_of_torchs():
    words = torch.randint(1, 0x7F800000, (1000,), generator=torch.Generator().manual_seed(0))
    for value in words.to(torch.int32).view(torch.float32):
        scale = dynamic(1.0)
        scale.materialize("cpu")
        scale.fill_(value)
        assert torch.equal(scale.snapshot(inverse=True), value.double().reciprocal().float())
