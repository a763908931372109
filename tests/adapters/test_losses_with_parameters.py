"""Is a parameter of a loss that no framework prepared named by its module, in errors, warnings and reports?"""

import math

import ignite.engine
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from amp_plugin import FabricAmpPrecision, GradScaler
from amp_plugin.adapters.ignite import IgnitePrecision
from tests.adapters.accelerate_pair import ours


class Contrastive(nn.Module):
    """A loss with a parameter in a submodule."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.ParameterDict({"temperature": torch.ones(2, dtype=dtype)})

    def forward(self, x):
        return (x.detach() * self.scale["temperature"][0].float()).mean()


def program(dtype):
    """Return a model, a loss, and an optimizer of both."""
    model, loss = nn.Linear(4, 2), Contrastive(dtype)
    return (
        model,
        loss,
        torch.optim.SGD([{"params": model.parameters()}, {"params": loss.parameters()}], lr=0.1),
    )


def accelerate_step(dtype, batches):
    accelerator = ours(init_scale=8.0)
    model, loss, optimizer = program(dtype)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss(model(batch)))
        optimizer.step()
    return accelerator.scaler, optimizer.optimizer


def fabric_step(dtype, batches):
    plugin = FabricAmpPrecision("fp16", init_scale=8.0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, loss, inner = program(dtype)
    model, optimizer = fabric.setup(model, inner)
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(loss(model(batch)))
        optimizer.step()
    return plugin.scaler, inner


def ignite_step(dtype, batches):
    amp = IgnitePrecision("fp16", init_scale=8.0)
    model, loss, optimizer = program(dtype)

    def update(engine, batch):
        optimizer.zero_grad()
        amp.backward(loss(model(batch)))
        amp.step(optimizer)

    trainer = ignite.engine.Engine(update)
    amp.attach(trainer, model, optimizer)
    trainer.run(batches)
    return amp.scaler, optimizer


DOORS = [accelerate_step, fabric_step, ignite_step]


@pytest.mark.parametrize("step", DOORS)
def test_the_warning_and_the_error_for_float16_name_it(step):
    with (
        pytest.warns(UserWarning, match=r"The first is Contrastive\.scale\.temperature\..* set up a loss"),
        pytest.raises(ValueError, match=r"Parameter 'Contrastive\.scale\.temperature' is float16"),
    ):
        step(torch.float16, [torch.ones(3, 4)])


@pytest.mark.parametrize("step", DOORS)
def test_the_report_of_an_overflow_names_it(step):
    scaler, optimizer = step(torch.float32, [torch.ones(3, 4), torch.full((3, 4), math.inf)])
    assert "Contrastive.scale.temperature" in str(scaler.last_step(optimizer).overflow_report())


@pytest.mark.parametrize(("allowed", "call"), [(False, "step"), (False, "unscale_"), (True, "update")])
def test_the_errors_of_a_plain_loop_name_it(allowed, call):
    model, loss, optimizer = program(torch.float16)
    scaler = GradScaler("cpu", init_scale=8.0, fp16_gradients=allowed)
    scaler.scale(loss(model(torch.ones(3, 4)))).backward()
    argument = 2.0 if allowed else optimizer
    for names in ({}, {"mine": loss.scale["temperature"]}):
        scaler.register(optimizer, names=names)
        expected = next(iter(names), r"Contrastive\.scale\.temperature")
        with pytest.raises((ValueError, RuntimeError), match=f"arameter '{expected}'"):
            getattr(scaler, call)(argument)
