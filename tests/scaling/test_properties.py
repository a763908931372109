"""Random sequences of calls agree with a float64 model that knows no scaling.

Gradients are small integers and scales powers of two, so a gradient is exact in float32.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_plugin import GradScaler

ACTIONS = [
    "backward",
    "unscale",
    "ensure",
    "clip",
    "fold",
    "value",
    "step",
    "update",
    "end",
    "zero",
    "zero_",
    "set",
]


def refused(call, optimizer):
    """The text of the RuntimeError that protects the user, or nothing."""
    try:
        call(optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


class Model:
    """What the gradients and parameters would be without a loss scale."""

    def __init__(self, optimizers, shared):
        self.grads = [None] * (optimizers + 1)
        self.params = [0.0] * (optimizers + 1)
        self.shared = shared
        self.updates = 0
        self.used_by = [set() for _ in self.params]  # since the last backward, or since it was unscaled again
        self.used_at = [0] * len(self.params)

    def owned(self, index):
        """The parameters of one optimizer: its own, and the shared one."""
        return [index, len(self.params) - 1] if self.shared else [index]

    def use(self, index, scale):
        """After a step and an update torch takes what is in ``.grad`` for scaled gradients."""
        for i in self.owned(index):
            if index in self.used_by[i] and self.used_at[i] != self.updates:
                self.used_by[i].clear()
                self.grads[i] = None if self.grads[i] is None else self.grads[i] / scale
            self.used_at[i] = self.updates

    def backward(self, indices, gradient):
        for used in self.used_by:
            used.clear()
        for index in indices:
            for i in self.owned(index):
                self.grads[i] = (self.grads[i] or 0.0) + gradient

    def finite(self, index):
        return all(math.isfinite(self.grads[i]) for i in self.owned(index) if self.grads[i] is not None)

    def step(self, index):
        for i in self.owned(index):
            self.used_by[i].add(index)
        if self.finite(index):
            for i in self.owned(index):
                if self.grads[i] is not None:
                    self.params[i] -= self.grads[i]


class World:
    """The same, with real optimizers and a scaler."""

    def __init__(self, optimizers, shared, fused, options):
        self.model = Model(optimizers, shared)
        self.params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(optimizers + 1)]
        self.optimizers = [
            torch.optim.SGD([self.params[i] for i in self.model.owned(index)], lr=1.0, fused=fused)
            for index in range(optimizers)
        ]
        self.scaler = GradScaler("cpu", init_scale=2.0**10, **options)
        self.scaler.register(*self.optimizers)
        self.scaler.scale(torch.ones(()))

    def update(self, *new_scale):
        self.scaler.update(*new_scale)
        self.model.updates += 1

    def use(self, call, index):
        """Make a call that uses gradients."""
        self.model.use(index, self.scaler.get_scale())
        return call(index)

    def backward(self, index, gradient):
        """A loss over one optimizer's parameters, or over all of them."""
        indices = range(len(self.optimizers)) if gradient % 2 == 0 else [index]
        used = [i for optimizer in indices for i in self.model.owned(optimizer)]
        loss = sum((self.params[i] * gradient).sum() for i in used)
        self.scaler.scale(loss).backward()
        self.model.backward(indices, gradient)

    def overflow(self, index):
        self.scaler.scale((self.params[index] * math.inf).sum()).backward()
        self.model.backward([], 0.0)
        self.model.grads[index] = math.inf

    def clip(self, index, fold):
        norm = self.scaler.clip_grad_norm_(self.optimizers[index], 1e30, fold=fold)
        owned = [self.model.grads[i] for i in self.model.owned(index) if self.model.grads[i] is not None]
        right = math.sqrt(sum(2 * g * g for g in owned))
        if math.isfinite(right):
            assert math.isclose(norm.item(), right, rel_tol=1e-6), (norm, right)
        else:
            assert not norm.isfinite()

    def value(self, index):
        self.scaler.clip_grad_value_(self.optimizers[index], 1e30)

    def zero(self, index, set_to_none):
        self.optimizers[index].zero_grad(set_to_none=set_to_none)
        for i in self.model.owned(index):
            if self.model.grads[i] is not None:
                self.model.grads[i] = None if set_to_none else 0.0

    def step(self, index):
        refusal = refused(self.scaler.step, self.optimizers[index])
        assert not refusal or refusal.startswith(("gradients were changed", "step() has already been called"))
        if refusal:
            self.scaler.ensure_unscaled(self.optimizers[index])
            return
        assert self.scaler.last_step(self.optimizers[index]).skipped == (not self.model.finite(index))
        self.model.step(index)
        for i in self.model.owned(index):
            grad, right = self.params[i].grad, self.model.grads[i]
            assert (grad is None) == (right is None)
            if grad is not None and math.isfinite(right):
                assert grad.tolist() == pytest.approx([right, right], rel=1e-6)

    def unscale(self, index):
        refusal = refused(self.scaler.unscale_, self.optimizers[index])
        assert not refusal or refusal.startswith("unscale_()")

    def check(self):
        for param, right in zip(self.params, self.model.params, strict=True):
            assert param.tolist() == pytest.approx([right, right], rel=1e-6), (param, right)


def act(world, action, index, gradient):
    calls = {
        "backward": lambda: world.backward(index, gradient),
        "unscale": lambda: world.use(world.unscale, index),
        "ensure": lambda: world.use(lambda i: world.scaler.ensure_unscaled(world.optimizers[i]), index),
        "clip": lambda: world.use(lambda i: world.clip(i, False), index),
        "fold": lambda: world.use(lambda i: world.clip(i, True), index),
        "value": lambda: world.use(world.value, index),
        "step": lambda: world.use(world.step, index),
        "update": world.update,
        "end": world.scaler.end_iteration,
        "zero": lambda: world.zero(index, True),
        "zero_": lambda: world.zero(index, False),
        "set": lambda: world.update(2.0 ** (gradient + 8)),
    }
    calls[action]()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    optimizers=st.integers(1, 3),
    shared=st.booleans(),
    fused=st.booleans(),
    interval=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(1, 5)), max_size=25),
)
def test_any_sequence_of_calls(optimizers, shared, fused, interval, steps):
    world = World(optimizers, shared, fused, {"growth_interval": interval})
    for action, index, gradient in steps:
        act(world, action, index % optimizers, gradient)
        world.check()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    optimizers=st.integers(1, 3),
    fused=st.booleans(),
    hysteresis=st.integers(1, 3),
    rounds=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()), max_size=12),
)
def test_overflows_skip_only_their_optimizer(optimizers, fused, hysteresis, rounds):
    """Each round: one joint backward, perhaps an overflow in one optimizer, all step."""
    world = World(optimizers, False, fused, {"growth_interval": 2, "hysteresis": hysteresis})
    for target, overflow, clip, update_each in rounds:
        for index in range(optimizers):
            world.zero(index, clip)
        world.backward(0, 2)
        if overflow:
            world.overflow(target % optimizers)
        for index in range(optimizers):
            if clip:
                world.clip(index, update_each)
            world.step(index)
            if update_each:
                world.update()
        world.update()
        world.check()
