"""What happens in fp16 if a batch has no loss, or if a loss was not scaled by the entry point?"""

import warnings

import ignite.engine
import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision, FabricAmpPrecision
from amp_plugin.adapters.ignite import IgnitePrecision
from tests.adapters.accelerate_pair import Weights, ours

BATCHES = range(4)


def optimizer_of(model, kind):
    return kind(model.parameters(), lr=1.0)


def accelerate_steps(losses, kind, clips, by_closure=False):
    accelerator = ours(init_scale=8.0)
    model = Weights()
    model, optimizer = accelerator.prepare(model, optimizer_of(model, kind))
    for factor in losses:

        def closure(factor=factor):
            optimizer.zero_grad()
            if factor is not None:
                accelerator.backward(model(factor))
            return 0.0

        if not by_closure:
            closure()
        if clips == "norm":
            accelerator.clip_grad_norm_(model.parameters(), 1e6)
        elif clips == "value":
            accelerator.clip_grad_value_(model.parameters(), 1e6)
        elif clips:
            accelerator.unscale_gradients()
        optimizer.step(*[closure] * by_closure)
        yield model.weight[0].item()


def fabric_steps(losses, kind, clips, by_closure=False):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricAmpPrecision("fp16", init_scale=8.0)])
    model = Weights()
    model, optimizer = fabric.setup(model, optimizer_of(model, kind))
    for factor in losses:

        def closure(factor=factor):
            optimizer.zero_grad()
            if factor is not None:
                fabric.backward(model(factor))
            return 0.0

        if not by_closure:
            closure()
        if clips == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=1e6, error_if_nonfinite=False)
        elif clips == "value":
            fabric.clip_gradients(model, optimizer, clip_val=1e6)
        optimizer.step(*[closure] * by_closure)
        yield model.weight[0].item()


def ignite_steps(losses, kind, clips, by_closure=False):
    amp = IgnitePrecision("fp16", init_scale=8.0, max_norm=1e6 if clips else None)
    model = Weights()
    optimizer = optimizer_of(model, kind)
    seen = []

    def update(engine, factor):
        optimizer.zero_grad()
        if factor[0] is not None:
            amp.backward(model(factor[0]))
        amp.step(optimizer)
        seen.append(model.weight[0].item())

    trainer = ignite.engine.Engine(update)
    amp.attach(trainer, model, optimizer)
    trainer.run([(factor,) for factor in losses])
    yield from seen


class Model(L.LightningModule):
    def __init__(self, losses, kind, clips, by_hand, by_closure):
        super().__init__()
        self.model, self.losses, self.kind, self.clips = Weights(), losses, kind, clips
        self.automatic_optimization, self.by_closure, self.seen = not by_hand, by_closure, []

    def training_step(self, batch, number):
        self.seen.append(self.model.weight[0].item())
        factor = self.losses[number]
        if self.automatic_optimization:
            return None if factor is None else self.model(factor)
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            if factor is not None:
                self.manual_backward(self.model(factor))
            return 0.0

        if not self.by_closure:
            closure()
        if self.clips:
            self.clip_gradients(optimizer, 1e6, self.clips)
        optimizer.step(*[closure] * self.by_closure)
        return None

    def configure_optimizers(self):
        return optimizer_of(self.model, self.kind)


def trainer_steps(losses, kind, clips, by_closure=False, *, by_hand=False):
    model = Model(losses, kind, clips, by_hand, by_closure)
    clip = {"gradient_clip_val": 1e6, "gradient_clip_algorithm": clips} if clips and not by_hand else {}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AmpPrecision("fp16", init_scale=8.0)],
        **clip,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(torch.ones(len(losses), 1)))
    yield from [*model.seen[1:], model.model.weight[0].item()]


def manual_steps(*args, **kwargs):
    return trainer_steps(*args, **kwargs, by_hand=True)


DOORS = [accelerate_steps, fabric_steps, ignite_steps, trainer_steps, manual_steps]
SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize("losses", [(None, 1, 1), (None, None, 1, None, 1), (1, None, 1), (None, None)])
@pytest.mark.parametrize("clips", [None, "norm", "value"])
@pytest.mark.parametrize("door", DOORS)
def test_a_batch_without_a_loss_changes_nothing(door, clips, losses):
    if clips == "value" and door is fabric_steps:
        pytest.skip("Fabric calls torch's clip_grad_value_, which wants a gradient")
    seen, weight = [], 0.0
    for loss in losses:
        weight -= loss or 0
        seen.append(weight)
    assert list(door(losses, SGD, clips)) == seen


@pytest.mark.parametrize("door", [accelerate_steps, fabric_steps, manual_steps])
@pytest.mark.parametrize("kind", [SGD, ADAM, torch.optim.LBFGS])
def test_nor_does_a_closure_without_one(door, kind):
    seen = list(door((None, 1, None, 1), kind, None, by_closure=True))
    assert seen[0] == 0.0
    assert seen[3] < seen[2] == seen[1] < 0.0


@pytest.mark.parametrize("door", ["accelerate", "fabric"])
def test_a_second_update_by_the_user_is_refused_as_in_torch(door):
    """The updates of the entry point itself go on, also in batches without a loss."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if door == "fabric":
        precision = FabricAmpPrecision("fp16", init_scale=8.0)
        made = Fabric(accelerator="cpu", devices=1, plugins=[precision])
        model, optimizer = made.setup(model, optimizer)
    else:
        made = ours(init_scale=8.0)
        model, optimizer = made.prepare(model, optimizer)
    scaler = precision.scaler if door == "fabric" else made.scaler
    for has_loss in (True, False, False, True):
        optimizer.zero_grad()
        if has_loss:
            made.backward(model(1.0))
        optimizer.step()
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            scaler.update()
    assert model.weight[0].item() == -2.0


def train_past(accelerator, backwards, *, set_to_none=True, accumulates=False):
    model = Weights()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for backward in backwards:
        if not accumulates:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(accelerator, model)
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
    return model.weight[0].item()


def scaled(accelerator, model):
    accelerator.backward(model(1.0))


def bare(accelerator, model):
    model(1.0).backward()


def by_scaler(accelerator, model):
    accelerator.scaler.scale(model(1.0)).backward()


def nothing(accelerator, model):
    pass


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("before", [(scaled,), (nothing, scaled), (scaled, by_scaler)])
def test_a_bare_backward_after_good_steps_is_refused(before, set_to_none):
    with pytest.raises(RuntimeError, match=r"1 parameters \(weight\).*accelerator.backward\(loss\)"):
        train_past(ours(init_scale=8.0), (*before, bare), set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_a_scaled_backward_made_or_nothing_is_not(set_to_none):
    backwards = (scaled, nothing, by_scaler, nothing, scaled)
    assert train_past(ours(init_scale=8.0), backwards, set_to_none=set_to_none) == -3.0


def test_a_bare_backward_without_a_loss_scale_is_not():
    assert train_past(ours(precision="bf16"), (scaled, bare)) == -2.0


def test_a_bare_backward_under_fabric_is_refused():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricAmpPrecision("fp16", init_scale=8.0)])
    model = Weights()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(wrapped(1.0))
    optimizer.step()
    optimizer.zero_grad()
    model.weight.square().sum().backward()  # a loss that does not come from a module that Fabric has set up
    with pytest.raises(RuntimeError, match=r"fabric.backward\(loss\)"):
        optimizer.step()
    assert model.weight[0].item() == -1.0
