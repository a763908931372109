"""Random windows with real clipping agree with float64 arithmetic that knows no scaling."""

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_plugin import GradScaler

CALLS = ["backward", "penalty", "unscale", "clip", "fold", "value", "update", "step"]


class Exact:
    """One optimizer's parameters in float64."""

    def __init__(self):
        self.param, self.grad = torch.zeros(6, dtype=torch.float64), None

    def add(self, gradient):
        self.grad = gradient.double() if self.grad is None else self.grad + gradient.double()

    def clip(self, max_norm):
        if self.grad is None:
            return 0.0
        norm = self.grad.norm().item()
        self.grad = self.grad * min(1.0, max_norm / (norm + 1e-6))
        return norm


class World:
    """The same with optimizers, a scaler and a loss with a scale of its own."""

    def __init__(self, optimizers, fused, init_scale):
        self.exact = [Exact() for _ in range(optimizers)]
        self.params = [torch.nn.Parameter(torch.zeros(6)) for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for p in self.params]
        self.scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=2, losses=("penalty",))
        self.scaler.register(*self.optimizers)
        self.scaler.scale(torch.ones(()))
        self.scaler.scale(torch.ones(()), name="penalty")

    def backward(self, index, seed, name=None):
        gradient = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        self.scaler.scale((self.params[index] * gradient).sum(), name=name).backward()
        self.exact[index].add(gradient)

    def clip(self, index, seed, fold):
        norm = self.scaler.clip_grad_norm_(self.optimizers[index], 0.5 + seed / 4, fold=fold).item()
        assert math.isclose(norm, self.exact[index].clip(0.5 + seed / 4), rel_tol=1e-5)

    def value(self, index):
        self.scaler.clip_grad_value_(self.optimizers[index], 0.5)
        if self.exact[index].grad is not None:
            self.exact[index].grad = self.exact[index].grad.clamp(-0.5, 0.5)

    def step(self, index):
        self.scaler.step(self.optimizers[index])
        self.optimizers[index].zero_grad()
        exact = self.exact[index]
        if exact.grad is not None:
            exact.param, exact.grad = exact.param - exact.grad, None

    def act(self, call, index, seed):
        if call in {"backward", "penalty"}:
            self.backward(index, seed, "penalty" if call == "penalty" else None)
        elif call in {"clip", "fold"}:
            self.clip(index, seed, call == "fold")
        elif call == "value":
            self.value(index)
        elif call == "unscale":
            self.scaler.ensure_unscaled(self.optimizers[index])
        elif call == "update":
            self.scaler.update()
        else:
            self.scaler.update()  # so that a step may follow a step
            self.step(index)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    optimizers=st.integers(1, 2),
    fused=st.booleans(),
    init_scale=st.sampled_from([2.0**10, 3.0, 1000.0]),
    calls=st.lists(
        st.tuples(st.sampled_from(CALLS), st.integers(0, 2), st.integers(0, 9)), min_size=8, max_size=24
    ),
)
def test_clipping_agrees_with_float64(optimizers, fused, init_scale, calls):
    world = World(optimizers, fused, init_scale)
    for call, index, seed in calls:
        world.act(call, index % optimizers, seed)
    for index in range(optimizers):
        world.act("step", index, 0)
    for param, exact in zip(world.params, world.exact, strict=True):
        torch.testing.assert_close(param.detach().double(), exact.param, rtol=1e-4, atol=1e-5)
