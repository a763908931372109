"""If a program turns the scaler of an entry point off and on by ``_enabled``, does it train as with torch's?"""

import ignite.engine
import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision, FabricAmpPrecision
from amp_plugin.adapters.ignite import IgnitePrecision
from tests.adapters.accelerate_pair import Weights, ours

BATCHES = torch.arange(1.0, 7.0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def torchs(switch):
    model, scaler, seen = Weights(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
    optimizer = sgd(model)
    for number, factor in enumerate(BATCHES):
        switch(scaler, number)
        optimizer.zero_grad()
        scaler.scale(model(factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((model.weight[0].item(), scaler.get_scale()))
    return seen


def accelerate(switch):
    accelerator, model, seen = ours(init_scale=8.0, growth_interval=2), Weights(), []
    model, optimizer = accelerator.prepare(model, sgd(model))
    for number, factor in enumerate(BATCHES):
        switch(accelerator.scaler, number)
        optimizer.zero_grad()
        accelerator.backward(model(factor))
        optimizer.step()
        seen.append((model.weight[0].item(), accelerator.scaler.get_scale()))
    return seen


def fabric(switch):
    plugin, model, seen = FabricAmpPrecision("fp16", init_scale=8.0, growth_interval=2), Weights(), []
    runner = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = runner.setup(model, sgd(model))
    for number, factor in enumerate(BATCHES):
        switch(plugin.scaler, number)
        optimizer.zero_grad()
        runner.backward(model(factor))
        optimizer.step()
        seen.append((model.weight[0].item(), plugin.scaler.get_scale()))
    return seen


def engine(switch):
    amp, model, seen = IgnitePrecision("fp16", init_scale=8.0, growth_interval=2), Weights(), []
    optimizer = sgd(model)

    def update(engine, factor):
        switch(amp.scaler, len(seen))
        optimizer.zero_grad()
        amp.backward(model(factor))
        amp.step(optimizer)
        seen.append((model.weight[0].item(), amp.scaler.get_scale()))

    trainer = ignite.engine.Engine(update)
    amp.attach(trainer, model, optimizer)
    trainer.run(list(BATCHES))
    return seen


class Model(L.LightningModule):
    def __init__(self, switch):
        super().__init__()
        self.model, self.switch, self.seen = Weights(), switch, []

    def training_step(self, batch, number):
        return self.model(batch[0])

    def on_train_batch_start(self, batch, number):
        self.switch(self.trainer.precision_plugin.scaler, number)

    def on_train_batch_end(self, *args):
        self.seen.append((self.model.weight[0].item(), self.trainer.precision_plugin.scaler.get_scale()))

    def configure_optimizers(self):
        return sgd(self.model)


def trainer(switch):
    model = Model(switch)
    L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AmpPrecision("fp16", init_scale=8.0, growth_interval=2)],
    ).fit(model, DataLoader(BATCHES, shuffle=False))
    return model.seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("is_on", ["110011", "001100"])
@pytest.mark.parametrize("door", [accelerate, fabric, engine, trainer])
def test_phases_without_a_scale_are_as_in_torch(door, is_on):
    def switch(scaler, number):
        scaler._enabled = is_on[number] == "1"

    assert door(switch) == torchs(switch)
