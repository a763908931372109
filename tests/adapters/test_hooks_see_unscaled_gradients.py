"""Gradient hooks that are registered in ``unscaled_hooks(scaler)`` see gradients without the loss scale."""

import pytest
import torch
from torch import nn

from amp_plugin import GradScaler, unscaled_hooks
from amp_plugin.adapters.accelerate import AmpAccelerator
from amp_plugin.adapters.lightning import AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import reset


class Watch:
    """Draw gradients as logging tools do: a hook on each parameter."""

    def __init__(self, model):
        self.seen = {}
        self.handles = [
            param.register_hook(lambda grad, name=name: self.seen.__setitem__(name, grad.clone()))
            for name, param in model.named_parameters()
        ]


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 4)


def reference():
    model, x = made()
    model(x).square().mean().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("make", [lambda: GradScaler("cpu"), lambda: torch.amp.GradScaler("cpu")])
def test_hooks_see_what_they_see_without_a_scaler(make):
    model, x = made()
    scaler = make()
    with unscaled_hooks(scaler):
        watch = Watch(model)
    outside = Watch(model)
    scaler.scale(model(x).square().mean()).backward()
    for name, grad in reference().items():
        torch.testing.assert_close(watch.seen[name], grad)
        torch.testing.assert_close(outside.seen[name], 65536 * grad)
        torch.testing.assert_close(model.get_parameter(name).grad, 65536 * grad)
    watch.seen.clear()
    for handle in watch.handles:
        handle.remove()
    scaler.scale(model(x).square().mean()).backward()
    assert not watch.seen


def plugin_of_trainer():
    return AmpPrecision("fp16"), lambda plugin, loss: plugin.scaler.scale(loss).backward()


def plugin_of_fabric():
    return FabricAmpPrecision("fp16"), lambda plugin, loss: plugin.scaler.scale(loss).backward()


def accelerator():
    reset()
    made = AmpAccelerator(cpu=True, mixed_precision="fp16")
    return made, lambda made, loss: made.scaler.scale(loss).backward()


@pytest.mark.parametrize("entry_point", [plugin_of_trainer, plugin_of_fabric, accelerator])
def test_entry_points(entry_point):
    owner, backward = entry_point()
    model, x = made()
    with unscaled_hooks(owner):
        watch = Watch(model)
    backward(owner, model(x).square().mean())
    for name, grad in reference().items():
        torch.testing.assert_close(watch.seen[name], grad)


@pytest.mark.parametrize("scaler", [GradScaler("cpu", enabled=False), None])
def test_without_a_loss_scale_the_gradient_itself_is_passed(scaler):
    model, x = made()
    with unscaled_hooks(scaler):
        watch = Watch(model)
    model(x).square().mean().backward()
    for name, grad in reference().items():
        assert torch.equal(watch.seen[name], grad)


def clipped(grad):
    return grad.clamp(-0.01, 0.01)


def clipped_in_place(grad):
    grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("hook", [clipped, clipped_in_place])
def test_a_gradient_that_a_hook_changes_is_scaled_again(hook):
    model, x = made()
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with unscaled_hooks(scaler):
        model[0].weight.register_hook(hook)
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(model[0].weight.grad, reference()["0.weight"].clamp(-0.01, 0.01))


@pytest.mark.parametrize("returns", [False, True])
def test_hooks_of_modules(returns):
    seen = []

    def after(module, grads_in, grads_out):
        seen.append([grads_in[0], grads_out[0]])
        return tuple(grad * 2 for grad in grads_in) if returns else None

    def before(module, grads_out):
        seen.append([grads_out[0]])
        return grads_out if returns else None

    grads = []
    for scaled in (False, True):
        model, x = made()
        scaler = GradScaler("cpu", enabled=scaled)
        with unscaled_hooks(scaler):
            model[1].register_full_backward_hook(after)
            model[1].register_full_backward_pre_hook(before)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        grads.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(seen[:2], seen[2:])
    torch.testing.assert_close(grads[0], grads[1])


def test_small_float16_gradients_are_passed_as_float32():
    scaler, seen = GradScaler("cpu", init_scale=65536.0), []
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with unscaled_hooks(scaler):
        x.register_hook(lambda grad: seen.append(grad) or grad)
    scaler.scale((x * 1.0).float().sum() * 1e-7).backward()
    assert seen[0].dtype is torch.float32
    assert seen[0].tolist() == pytest.approx([1e-7] * 2, rel=1e-3)
    assert x.grad.dtype is torch.float16
    assert x.grad.tolist() == pytest.approx([1e-7 * 65536] * 2, rel=1e-3)
