"""16-bit weights that are frozen when the model is set up, and are trained later."""

import copy

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision, FabricAmpPrecision, autocast, store_weights
from amp_plugin.weights.weight import stored_weight
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import QUIET, fit
from tests.weights.twins import assert_same, train

X = torch.linspace(-1, 1, 28).reshape(4, 7)


def network(first=torch.bfloat16):
    """Return a network in the given dtype whose first layer is frozen, with values that bfloat16 can
    represent.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    model[0].bfloat16().to(first).requires_grad_(False)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def in_a_plain_loop(model):
    optimizer = adamw(model)
    store_weights(model, optimizer, weights="fp32")
    return autocast("cpu", dtype=torch.bfloat16)(model), optimizer, torch.Tensor.backward


def in_fabric(model):
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16"))
    return *fabric.setup(model, adamw(model)), fabric.backward


def in_accelerate(model):
    accelerator = ours(precision="bf16")
    return *accelerator.prepare(model, adamw(model)), accelerator.backward


def take_steps(net, optimizer, backward, count):
    for _ in range(count):
        optimizer.zero_grad()
        backward(net(X).float().square().mean())
        optimizer.step()


@pytest.mark.parametrize("program", [in_a_plain_loop, in_fabric, in_accelerate])
def test_they_are_trained_as_in_float32(program):
    runs = []
    for first in (torch.float32, torch.bfloat16):
        model = network(first)
        loop = program(model)
        take_steps(*loop, 2)
        assert model[0].weight.dtype is first, "as long as it is frozen"
        start = model[0].weight.detach().float().clone()
        model[0].requires_grad_(True)
        take_steps(*loop, 4)
        assert model[0].weight.dtype is model[0].weight.grad.dtype is torch.float32
        assert (model[0].weight != start).float().mean() > 0.9
        runs.append(model)
        reset()
    assert_same(*runs)


def test_they_become_what_the_last_set_up_asked_for():
    plain, model = models = network(torch.float32), network()
    store_weights(model, weights="fp16")
    store = store_weights(model, weights="bf16")
    assert model.state_dict()["0.weight"].dtype is torch.bfloat16, "as they came"
    optimizers = [adamw(model) for model in models]
    store.add(optimizers[1])
    for net in models:
        net[0].weight.requires_grad = net[0].bias.requires_grad = True
    assert len(store) == 4
    train(models, optimizers, 20)
    assert_same(plain, model)


def test_state_of_weights_that_were_trained_is_loaded_in_float32():
    (saved, loop), (other, others) = ((model, in_a_plain_loop(model)) for model in (network(), network()))
    saved[0].requires_grad_(True)
    take_steps(*loop, 2)
    others[1].load_state_dict(loop[1].state_dict())
    assert other[0].weight.dtype is torch.float32
    assert not other[0].weight.requires_grad
    moments = [[state["exp_avg"] for state in optimizer.state.values()] for _, optimizer, _ in (loop, others)]
    assert [moment.dtype for moment in moments[1]] == [torch.float32] * 4
    assert all(map(torch.equal, *moments))


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_frozen_weights_stay_as_they_came_but_norms_and_copies_that_are_trained_are_float32(weights):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).bfloat16().requires_grad_(False)
    store_weights(model, weights=weights)
    twin = copy.deepcopy(model).requires_grad_(True)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    assert weights == "fp32" or {param.dtype for param in twin.parameters()} == {torch.float32}


def test_a_part_of_a_flat_tensor_is_left():
    model = network()
    flat = torch.zeros(72, dtype=torch.bfloat16)
    model[0].weight.data, model[0].bias.data = flat[:63].view(9, 7), flat[63:]
    store_weights(model, weights="fp32")
    model[0].requires_grad_(True)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[0].weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    store_weights(model[2], optimizer := adamw(model[2]))
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.warns(UserWarning, match="AdamW steps 2 parameters in 16 bits, so updates below 1/256"):
        optimizer.step()


class Thawed(LightningModule):
    """A module whose first layer is frozen during the first batch only."""

    def __init__(self):
        super().__init__()
        self.model, self.low_halves = network(), []

    def on_train_batch_start(self, batch, batch_idx):
        self.model[0].requires_grad_(batch_idx > 0)

    def training_step(self, batch, batch_idx):
        self.low_halves.append(stored_weight(self.model[0].weight) is not None)
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TestUnderTheTrainer:
    pytestmark = QUIET

    @pytest.mark.parametrize("weights", ["bf16", "fp32"])
    def test_they_are_converted_before_their_first_step_in_a_second_run_of_a_plugin_too(self, weights):
        module, plugin = Thawed(), AmpPrecision("bf16", weights=weights)
        for steps in (1, 2):
            fit(module, plugin, steps=steps, data=DataLoader(X, batch_size=2))
        assert module.low_halves == [False, False, weights == "bf16"]
        assert module.model[0].weight.dtype is torch.float32
