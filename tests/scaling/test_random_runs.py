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

EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 99), st.sampled_from([0.01, 1.0, 100.0])),
    st.tuples(st.just("clip"), st.integers(0, 99), st.sampled_from([0.1, 1e6])),
    st.tuples(st.just("overflow"), st.integers(0, 99), st.sampled_from([torch.inf, torch.nan])),
    st.tuples(
        st.just("options"), st.sampled_from(["lr", "weight_decay", "betas", "momentum"]), st.floats(0.01, 0.9)
    ),
    st.tuples(st.just("flags"), st.sampled_from(["fused", "foreach", "maximize"]), st.booleans()),
    st.tuples(st.just("group"), st.integers(0, 99), st.floats(0.01, 0.5)),
    st.tuples(st.just("round trip"), st.none(), st.none()),
    st.tuples(st.just("switch"), st.none(), st.none()),
    st.tuples(st.just("no gradient"), st.integers(0, 2), st.none()),
)


class Oracle:
    """The same run in float64, by torch.optim, without a loss scale."""

    def __init__(self, run, kind):
        self.params = [torch.nn.Parameter(param.detach().double()) for param in run.params]
        cls, defaults = KINDS[kind]
        self.optimizer = cls(self.params, **defaults)

    def step(self, run, max_norm=None, scale=1.0):
        for param, other in zip(self.params, run.params, strict=True):
            param.grad = None if other.grad is None else other.grad.double() / scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()


class Player:
    """Plays events on a run and on its oracle."""

    def __init__(self, kind, scale):
        self.run = Run(kind, scaler=scaler_of(scale))
        self.oracle = Oracle(self.run, kind)
        self.scalers = itertools.cycle([scaler_of(scale, one_pass=on) for on in (False, True)])
        self.without = None

    def play(self, event, first, second):
        getattr(self, "on_" + event.replace(" ", "_"))(first, second)

    def backward(self, seed, factor=1.0):
        self.run.backward(seed, factor)
        if self.without is not None:
            self.run.params[self.without].grad, self.without = None, None

    def on_step(self, seed, factor):
        self.backward(seed, factor)
        self.oracle.step(self.run, scale=self.run.scaler.get_scale())
        self.finish()

    def on_clip(self, seed, max_norm):
        self.backward(seed)
        self.oracle.step(self.run, max_norm, scale=self.run.scaler.get_scale())
        self.run.scaler.clip_grad_norm_(self.run.optimizer, max_norm, fold=bool(seed % 2))
        self.finish()

    def on_overflow(self, seed, value):
        self.backward(seed)
        grad = next(param.grad for param in self.run.params if param.grad is not None)
        grad.data.flatten()[0] = value
        self.finish()

    def finish(self):
        self.spare_torch()
        self.run.scaler.step(self.run.optimizer)
        self.run.scaler.update()

    def spare_torch(self):
        """Torch's fused SGD is a TypeError where only some parameters of a group have a momentum buffer yet."""
        state = self.run.optimizer.state
        for group in self.run.optimizer.param_groups:
            with_gradient = [param for param in group["params"] if param.grad is not None]
            begun = [
                state[param].get("momentum_buffer") is not None for param in with_gradient if param in state
            ]
            if group.get("momentum") and 0 < sum(begun) < len(with_gradient):
                group["fused"] = None

    def on_options(self, name, value):
        for optimizer in (self.run.optimizer, self.oracle.optimizer):
            for group in optimizer.param_groups:
                if name == "betas" and "betas" in group:
                    group["betas"] = (value, 1 - value / 100)
                elif name in group and not (name == "momentum" and group["momentum"] == 0):
                    group[name] = value

    def on_flags(self, name, value):
        for group in self.run.optimizer.param_groups:
            if name != "maximize":
                group["fused"], group["foreach"] = None, None
            group[name] = value
        for group in self.oracle.optimizer.param_groups:
            group["maximize"] = self.run.optimizer.param_groups[0]["maximize"]

    def on_group(self, seed, lr):
        param = torch.nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(seed)))
        maximize = self.run.optimizer.param_groups[0]["maximize"]
        self.run.params.append(param)
        self.run.optimizer.add_param_group({"params": [param], "lr": lr, "maximize": maximize})
        self.oracle.params.append(torch.nn.Parameter(param.detach().double()))
        self.oracle.optimizer.add_param_group(
            {"params": [self.oracle.params[-1]], "lr": lr, "maximize": maximize}
        )

    def on_round_trip(self, *_):
        self.run.optimizer.load_state_dict(copy.deepcopy(self.run.optimizer.state_dict()))

    def on_switch(self, *_):
        self.run.optimizer.zero_grad()
        self.run.scaler = next(self.scalers)

    def on_no_gradient(self, which, _):
        self.without = which


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(KINDS)), st.sampled_from([None, 64.0]), st.lists(EVENTS, min_size=3, max_size=14))
def test_random_runs_against_float64(kind, scale, events):
    player = Player(kind, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for event in events:
            player.play(*event)
    for param, right in zip(player.run.params, player.oracle.params, strict=True):
        torch.testing.assert_close(param.detach().double(), right.detach(), rtol=2e-4, atol=2e-5)
