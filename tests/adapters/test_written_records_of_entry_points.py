"""If a program writes a record of an entry point's scaler and keeps the gradients, does it train as with torch's?"""

import pytest
import torch
from lightning.fabric import Fabric
from torch.amp.grad_scaler import OptState

from amp_plugin import FabricAmpPrecision
from tests.adapters.accelerate_pair import Weights, ours, stock

BATCHES = torch.arange(1.0, 5.0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def accelerate(write, accelerator):
    model, seen = Weights(), []
    model, optimizer = accelerator.prepare(model, sgd(model))
    for number, factor in enumerate(BATCHES):
        optimizer.zero_grad()
        accelerator.backward(model(factor))
        if number % 2:
            accelerator.unscale_gradients()
            write(accelerator.scaler, optimizer.optimizer, model.weight)
        optimizer.step()
        seen.append((model.weight[0].item(), accelerator.scaler.get_scale()))
    return seen


def with_accelerate(write):
    return accelerate(write, ours(init_scale=8.0, growth_interval=2))


def with_fabric(write):
    plugin, model, seen = FabricAmpPrecision("fp16", init_scale=8.0, growth_interval=2), Weights(), []
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    inner = sgd(model)
    model, optimizer = fabric.setup(model, inner)
    for number, factor in enumerate(BATCHES):
        optimizer.zero_grad()
        fabric.backward(model(factor))
        if number % 2:
            plugin.unscale_gradients(optimizer)
            write(plugin.scaler, inner, model.weight)
        optimizer.step()
        seen.append((model.weight[0].item(), plugin.scaler.get_scale()))
    return seen


def written(scaler, optimizer, weight):
    record = scaler._per_optimizer_states[id(optimizer)]
    assert record["stage"] is OptState.UNSCALED
    record["stage"] = OptState.READY
    weight.grad.mul_(scaler.get_scale())


def popped(scaler, optimizer, weight):
    assert [*scaler._per_optimizer_states] == [id(optimizer)]
    scaler._per_optimizer_states.pop(id(optimizer))
    assert not scaler._per_optimizer_states
    weight.grad.mul_(scaler.get_scale())


@pytest.mark.parametrize("door", [with_accelerate, with_fabric])
@pytest.mark.parametrize("write", [written, popped])
def test_gradients_that_a_program_keeps_count_as_scaled_again(write, door):
    theirs = accelerate(write, stock(init_scale=8.0, growth_interval=2))
    assert door(write) == theirs
