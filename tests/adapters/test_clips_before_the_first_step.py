"""A program clips the gradients of two optimizers before it steps the first one.

The loss scale then changes once per iteration, as without the clips. With torch.amp.GradScaler and an
``update()`` after each step, it changes twice, and the second optimizer's gradients are divided twice.
"""

import math

import pytest
import torch
from lightning.fabric import Fabric

from amp_plugin import AmpAccelerator, AmpKwargs, AmpPrecision, FabricAmpPrecision, GradScaler
from tests.adapters.lightning_models import QUIET, TwoOptimizers, batches, fit, weight

pytestmark = QUIET
SCALE = {"init_scale": 2.0**10, "growth_interval": 2}
STEPS = 5


def loss_of(a, b, *, overflows):
    """Return a loss whose gradient overflows for the second weight only."""
    return a + b * (math.inf if overflows else 1.0)


def by_plain_loop(overflow_at, clips):
    a, b = weight(), weight()
    first, second = torch.optim.SGD([a], lr=1e-3), torch.optim.SGD([b], lr=1e-3)
    scaler = GradScaler("cpu", **SCALE)
    scaler.register(first, second)
    scales, befores = [], []
    for step in range(STEPS):
        scaler.scale(loss_of(a, b, overflows=step == overflow_at)).backward()
        for optimizer in (first, second) if clips else ():
            scaler.clip_grad_norm_(optimizer, 1.0)
        for optimizer in (first, second):
            scaler.step(optimizer)
            scaler.update()
        befores.append([scaler.last_step(optimizer).scale_before for optimizer in (first, second)])
        first.zero_grad(), second.zero_grad()
        scales.append(scaler.get_scale())
    return scales, befores


def by_accelerate(overflow_at, clips):
    accelerator = AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[AmpKwargs(**SCALE)])
    a, b = torch.nn.ParameterList([weight()]), torch.nn.ParameterList([weight()])
    made = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (a, b)]
    first, second = accelerator.prepare(*made)
    scales, befores = [], []
    for step in range(STEPS):
        accelerator.backward(loss_of(a[0], b[0], overflows=step == overflow_at))
        for one in (a, b) if clips else ():
            accelerator.clip_grad_norm_(one.parameters(), 1.0)
        first.step(), second.step()
        befores.append([accelerator.last_step(one).scale_before for one in (first, second)])
        first.zero_grad(), second.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    return scales, befores


def by_fabric(overflow_at, clips):
    plugin = FabricAmpPrecision("fp16", **SCALE)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    pairs = [fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3)) for model in models]
    scales, befores = [], []
    for step in range(STEPS):
        a, b = (model.weight.sum() for model, _ in pairs)
        fabric.backward(loss_of(a, b, overflows=step == overflow_at))
        for model, optimizer in pairs if clips else ():
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        for _, optimizer in pairs:
            optimizer.step()
        befores.append([plugin.scaler.last_step(optimizer).scale_before for _, optimizer in pairs])
        for _, optimizer in pairs:
            optimizer.zero_grad()
        scales.append(plugin.scaler.get_scale())
    return scales, befores


def by_trainer(overflow_at, clips):
    plugin = AmpPrecision("fp16", **SCALE)
    scales, befores = [], []

    def step(module, batch, batch_idx):
        optimizers = module.optimizers()
        module.manual_backward(loss_of(module.a, module.b, overflows=batch_idx == overflow_at))
        for optimizer in optimizers if clips else ():
            module.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        for optimizer in optimizers:
            optimizer.step()
        befores.append([plugin.scaler.last_step(one.optimizer).scale_before for one in optimizers])
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(plugin.scaler.get_scale())

    fit(TwoOptimizers(step=step), plugin, steps=2 * STEPS, data=batches(STEPS))
    return scales, befores


@pytest.mark.parametrize("clips", [False, True], ids=["no clip", "clipped first"])
@pytest.mark.parametrize("overflow_at", [None, 1])
@pytest.mark.parametrize("train", [by_plain_loop, by_accelerate, by_fabric, by_trainer])
def test_the_loss_scale_changes_once_per_iteration(train, overflow_at, clips):
    scales, befores = train(overflow_at, clips)
    if overflow_at is None:
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12]
    else:
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]
    assert befores == [[scale, scale] for scale in [2.0**10, *scales[:-1]]]


def test_torch_changes_it_twice_and_divides_twice():
    a, b = weight(0.0), weight(0.0)
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.scale(a + b).backward()
    scaler.unscale_(first), scaler.unscale_(second)
    for optimizer in (first, second):
        scaler.step(optimizer)
        scaler.update()
    assert (a.item(), b.item(), scaler.get_scale()) == (-1.0, -(2.0**-10), 2.0**11)


def test_an_optimizer_that_is_not_stepped_keeps_no_update_back_for_long():
    """If a program leaves out the step of one optimizer, the next scaled loss uses the new loss scale."""
    a, b = weight(), weight()
    first, second = torch.optim.SGD([a], lr=1e-3), torch.optim.SGD([b], lr=1e-3)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.register(first, second)
    for step in range(3):
        scaler.scale(a + b).backward()
        assert a.grad.item() == 8.0 * 2**step
        scaler.unscale_(first), scaler.unscale_(second)
        scaler.step(first)
        scaler.update()
        first.zero_grad(), second.zero_grad()
    assert scaler.get_scale() == 64.0
