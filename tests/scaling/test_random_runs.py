"""Random runs of optimizers that step in one pass agree with torch.optim in float64, scaled or not."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scaling.runs import KINDS, Run, scaler_of

pytestmark = pytest.mark.native

SEEDS = st.integers(0, 99)
EVENTS = st.one_of(
    st.tuples(st.just("step"), SEEDS, st.sampled_from([0.01, 1.0, 100.0])),
    st.tuples(st.just("clip"), SEEDS, st.sampled_from([0.1, 1e6])),
    st.tuples(st.just("overflow"), SEEDS, st.sampled_from([torch.inf, torch.nan])),
    st.tuples(
        st.just("options"), st.sampled_from(["lr", "weight_decay", "betas", "momentum"]), st.floats(0.01, 0.9)
    ),
    st.tuples(st.just("flags"), st.sampled_from(["fused", "foreach", "maximize"]), st.booleans()),
    st.tuples(st.just("group"), SEEDS, st.floats(0.01, 0.5)),
    st.tuples(st.sampled_from(["round_trip", "switch"])),
    st.tuples(st.just("no_gradient"), st.integers(0, 2)),
)


class Player:
    """Plays events on a run, and on torch.optim in float64 without a loss scale."""

    def __init__(self, kind, scale):
        self.run = Run(kind, scaler=scaler_of(scale))
        self.params = [torch.nn.Parameter(param.detach().double()) for param in self.run.params]
        cls, defaults = KINDS[kind]
        self.optimizer = cls(self.params, **defaults)
        self.scalers = itertools.cycle([scaler_of(scale, one_pass=on) for on in (False, True)])
        self.without = None

    def backward(self, seed, factor=1.0):
        self.run.backward(seed, factor)
        if self.without is not None:
            self.run.params[self.without].grad, self.without = None, None

    def step_right(self, max_norm=None):
        for param, other in zip(self.params, self.run.params, strict=True):
            param.grad = None if other.grad is None else other.grad.double() / self.run.scaler.get_scale()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()

    def step(self, seed, factor):
        self.backward(seed, factor)
        self.step_right()
        self.finish()

    def clip(self, seed, max_norm):
        self.backward(seed)
        self.step_right(max_norm)
        self.run.scaler.clip_grad_norm_(self.run.optimizer, max_norm, fold=bool(seed % 2))
        self.finish()

    def overflow(self, seed, value):
        self.backward(seed)
        grad = next(param.grad for param in self.run.params if param.grad is not None)
        grad.data.flatten()[0] = value
        self.finish()

    def finish(self):
        """Torch's fused SGD is a TypeError where only some parameters of a group have a momentum buffer yet."""
        state = self.run.optimizer.state
        for group in self.run.optimizer.param_groups:
            present = [param for param in group["params"] if param.grad is not None]
            begun = [state[p].get("momentum_buffer") is not None for p in present if p in state]
            if group.get("momentum") and 0 < sum(begun) < len(present):
                group["fused"] = None
        self.run.scaler.step(self.run.optimizer)
        self.run.scaler.update()

    def options(self, name, value):
        for group in (*self.run.optimizer.param_groups, *self.optimizer.param_groups):
            if name == "betas" and "betas" in group:
                group["betas"] = (value, 1 - value / 100)
            elif name in group and not (name == "momentum" and group["momentum"] == 0):
                group[name] = value

    def flags(self, name, value):
        for group in self.run.optimizer.param_groups:
            if name != "maximize":
                group["fused"], group["foreach"] = None, None
            group[name] = value
        for group in self.optimizer.param_groups:
            group["maximize"] = self.run.optimizer.param_groups[0]["maximize"]

    def group(self, seed, lr):
        value = torch.randn(9, generator=torch.Generator().manual_seed(seed))
        maximize = self.run.optimizer.param_groups[0]["maximize"]
        for side, start in ((self.run, value), (self, value.double())):
            side.params.append(torch.nn.Parameter(start))
            side.optimizer.add_param_group({"params": [side.params[-1]], "lr": lr, "maximize": maximize})

    def round_trip(self):
        self.run.optimizer.load_state_dict(copy.deepcopy(self.run.optimizer.state_dict()))

    def switch(self):
        self.run.optimizer.zero_grad()
        self.run.scaler = next(self.scalers)

    def no_gradient(self, which):
        self.without = which


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(KINDS)), st.sampled_from([None, 64.0]), st.lists(EVENTS, min_size=3, max_size=14))
def test_random_runs_against_float64(kind, scale, events):
    player = Player(kind, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for event, *arguments in events:
            getattr(player, event)(*arguments)
    for param, right in zip(player.run.params, player.params, strict=True):
        torch.testing.assert_close(param.detach().double(), right.detach(), rtol=2e-4, atol=2e-5)
