"""Averages of weights are updated after steps that were taken, and not after skipped ones."""

import math

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch.optim.swa_utils import AveragedModel

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.lightning import AmpPrecision, FabricAmpPrecision
from tests.adapters.lightning_models import QUIET, fit, stock, weight

pytestmark = QUIET

BATCHES = [3.0, math.inf, 3.0, math.nan, 3.0]
LANDED = 3


class Model(LightningModule):
    def __init__(self, manual=False, optimizers=1):
        super().__init__()
        self.automatic_optimization = not manual
        self.weights = torch.nn.ParameterList([weight() for _ in range(optimizers)])

    def training_step(self, batch, batch_idx):
        loss = sum(w * batch for w in self.weights)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        optimizers = self.optimizers()
        for place, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            if place and batch == BATCHES[0]:
                # of several optimizers, only the first one takes its step
                self.weights[place].grad.fill_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self):
        return [torch.optim.SGD([w], lr=0.1) for w in self.weights]


def numbers(values):
    return torch.utils.data.DataLoader([torch.tensor(value) for value in values], batch_size=None)


def averaged(plugin, callback, *, model=None, steps=5, data=BATCHES, **options):
    """Train, and return how often the callback has averaged."""
    fit(model or Model(), plugin, steps, numbers(data), callbacks=[callback], **options)
    return int(callback._average_model.n_averaged)


@pytest.mark.parametrize("make", [EMAWeightAveraging, WeightAveraging])
def test_lightnings_own_plugin_averages_at_skipped_steps_too(make):
    """If this fails, Lightning has fixed the issue, and our workaround can be removed."""
    assert averaged(stock(init_scale=8.0), make()) == len(BATCHES)


@pytest.mark.parametrize("make", [EMAWeightAveraging, WeightAveraging])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_average_under_the_trainer_is_updated_by_landed_steps_only(precision, make):
    callback = make()
    assert averaged(AmpPrecision(precision), callback) == LANDED
    assert "should_update" not in vars(callback), "its method is its own again"


def test_the_average_is_that_of_a_run_without_the_bad_batches():
    one, other = (EMAWeightAveraging(decay=0.5) for _ in range(2))
    averaged(AmpPrecision("bf16"), one)
    averaged(AmpPrecision("bf16"), other, steps=LANDED, data=[x for x in BATCHES if math.isfinite(x)])
    assert torch.equal(one._average_model.module.weights[0], other._average_model.module.weights[0])


def test_micro_batches_after_a_skipped_step_do_not_average():
    data = [3.0, 3.0, math.inf, 3.0, 3.0, 3.0]
    callback = EMAWeightAveraging()
    assert averaged(AmpPrecision("bf16"), callback, steps=3, data=data, accumulate_grad_batches=2) == 2


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization_averages_if_any_step_of_the_batch_has_landed(optimizers):
    model = Model(manual=True, optimizers=optimizers)
    steps = len(BATCHES) * optimizers
    assert averaged(AmpPrecision("bf16"), EMAWeightAveraging(), model=model, steps=steps) == LANDED


def test_a_callbacks_own_choice_of_steps_is_kept():
    class Second(EMAWeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None and step_idx % 2 == 1

    assert averaged(AmpPrecision("bf16"), Second(), data=[3.0] * 6, steps=6) == 3
    assert averaged(AmpPrecision("bf16"), Second(), data=[3.0, math.nan, 3.0, 3.0], steps=4) == 1


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fabric_and_accelerate_tell_whether_a_step_has_landed(precision, wait):
    plugin = FabricAmpPrecision(precision, init_scale=8.0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    accelerator = AmpAccelerator(
        mixed_precision=precision, cpu=True, kwargs_handlers=[AmpKwargs(init_scale=8.0)]
    )
    for door, setup, backward in [
        (plugin, fabric.setup, fabric.backward),
        (accelerator, accelerator.prepare, accelerator.backward),
    ]:
        model = torch.nn.Linear(1, 1)
        average = AveragedModel(model)
        model, optimizer = setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for value in BATCHES:
            backward(model(torch.tensor([[value]])).sum())
            optimizer.step()
            optimizer.zero_grad()
            if door.landed(optimizer, wait=wait):
                average.update_parameters(model)
        assert int(average.n_averaged) == LANDED
