"""Weights in 16 bits that are frozen when a model is set up under "fp32", and trained later."""

import copy
import pickle

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision, FabricAmpPrecision, autocast, store_weights
from amp_plugin.weights.store import FrozenWeights, set_up_when_unfrozen, widen_unfrozen
from amp_plugin.weights.weight import stored_weight
from tests.adapters.accelerate_pair import ours, reset

THAWED = "2 trainable parameters came in bfloat16 .* and are float32 now .* since 16 bits lose small updates"
X = torch.linspace(-1, 1, 28).reshape(4, 7)


@pytest.fixture(autouse=True)
def _without_accelerate():
    yield
    reset()


def network(first=torch.bfloat16):
    """A network whose first layer is frozen, in the dtype given, with the values of bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    model[0].bfloat16().to(first).requires_grad_(False)
    return model


def trained_plainly(model, optimizer, steps, forward=None):
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = (forward or model)(X).float().square().mean()
        loss.backward()
        optimizer.step()


def in_a_plain_loop(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    store_weights(model, optimizer, weights="fp32")
    return lambda steps: trained_plainly(model, optimizer, steps)


def in_fabric(model):
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16"))
    net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            fabric.backward(net(X).square().mean())
            optimizer.step()

    return train


def in_accelerate(model):
    accelerator = ours(precision="bf16")
    net, optimizer, _ = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-5), DataLoader([0])
    )

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(net(X).square().mean())
            optimizer.step()

    return train


@pytest.mark.parametrize("program", [in_a_plain_loop, in_fabric, in_accelerate])
def test_they_are_trained_as_in_float32(program):
    runs = []
    for first in (torch.float32, torch.bfloat16):
        model = network(first)
        train = program(model)
        train(2)
        assert model[0].weight.dtype is first, "as long as it is frozen"
        start = model[0].weight.detach().float().clone()
        model[0].requires_grad_(True)
        if first is torch.bfloat16:
            with pytest.warns(UserWarning, match=THAWED):
                train(1)
        else:
            train(1)
        train(3)
        assert model[0].weight.dtype is model[0].weight.grad.dtype is torch.float32
        assert (model[0].weight != start).float().mean() > 0.9
        runs.append(model.state_dict())
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


def test_they_become_what_the_last_set_up_asked_for():
    model = network()
    store_weights(model, weights="fp16")
    store = store_weights(model, weights="bf16")
    model[0].requires_grad_(True)
    with autocast("cpu", dtype=torch.bfloat16):
        model(X)
    assert len(store) == 4
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_an_evaluation_converts_nothing():
    model = network()
    store_weights(model, weights="fp32")
    model[0].requires_grad_(True)
    with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16):
        model(X)
    assert model[0].weight.dtype is torch.bfloat16


def test_state_of_weights_that_had_become_float32_is_loaded_in_float32():
    saved, other = network(), network()
    runs = []
    for model in (saved, other):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        store_weights(model, optimizer, weights="fp32")
        runs.append(optimizer)
    saved[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=THAWED):
        trained_plainly(saved, runs[0], 2)
    runs[1].load_state_dict(runs[0].state_dict())
    assert other[0].weight.dtype is torch.float32
    moments = [state["exp_avg"] for state in runs[1].state.values()]
    assert [moment.dtype for moment in moments] == [torch.float32] * 4
    assert all(
        torch.equal(moment, state["exp_avg"])
        for moment, state in zip(moments, runs[0].state.values(), strict=True)
    )
    other[0].requires_grad_(True)
    trained_plainly(other, runs[1], 1)


def test_it_is_one_hook_that_goes_with_copies():
    model = network()
    whole = nn.Linear(2, 2)
    for given in (model, model, whole):
        set_up_when_unfrozen(given, widen_unfrozen)
    assert (len(model._forward_pre_hooks), len(whole._forward_pre_hooks)) == (1, 0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (copied,) = twin._forward_pre_hooks.values()
        assert isinstance(copied, FrozenWeights)
        twin[0].requires_grad_(True)
        with pytest.warns(UserWarning, match=THAWED), autocast("cpu", dtype=torch.bfloat16):
            twin(X)
        assert twin[0].weight.dtype is torch.float32
        assert model[0].weight.dtype is torch.bfloat16


def test_a_part_of_a_flat_tensor_is_left():
    model = network()
    flat = torch.zeros(72, dtype=torch.bfloat16)
    model[0].weight.data, model[0].bias.data = flat[:63].view(9, 7), flat[63:]
    set_up_when_unfrozen(model, widen_unfrozen)
    model[0].requires_grad_(True)
    with autocast("cpu", dtype=torch.bfloat16):
        model(X)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[0].weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*(workers|logging interval|eval mode)")
def test_under_bf16_weights_the_trainer_stores_them_before_their_first_step():
    class Module(LightningModule):
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

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module, plugin = Module(), AmpPrecision("bf16", weights="bf16")
    trainer = Trainer(max_epochs=1, accelerator="cpu", plugins=[plugin], enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(X, batch_size=2))
    assert module.low_halves == [False, True]
