"""Each front door leaves unscaled gradients after its step: what users log between ``step()`` and ``zero_grad()``."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule

from amp_plugin import AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import ours
from tests.adapters.lightning_models import QUIET, batches, fit

pytestmark = QUIET
GRADIENT = 3.0
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Manual(LightningModule):
    """Several weights with an optimizer each; ``play`` is the training step and notes gradients in ``seen``."""

    def __init__(self, make, play, count=2):
        super().__init__()
        self.automatic_optimization = False
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4)) for _ in range(count))
        self.make, self.play, self.seen = make, play, []

    def training_step(self, batch, batch_idx):
        self.play(self, batch, batch_idx)

    def configure_optimizers(self):
        return [self.make([weight]) for weight in self.weights]

    def backward_of(self, *numbers):
        self.manual_backward(sum((self.weights[i] * GRADIENT).sum() for i in numbers))

    def step(self, number):
        self.optimizers()[number].step()
        self.seen.append(self.weights[number].grad.norm().item() / 2)  # of 4 equal elements


def several_optimizers(module, batch, batch_idx):
    for number in (0, 1):
        module.optimizers()[number].zero_grad()
    module.backward_of(0, 1)
    for number in (0, 1):
        module.step(number)


def without_gradients(module, batch, batch_idx):
    module.optimizers()[0].zero_grad()
    module.backward_of(0)
    module.step(0)
    module.optimizers()[1].step()
    assert module.weights[1].grad is None


def n_critic(module, batch, batch_idx):
    module.optimizers()[0].zero_grad()
    module.backward_of(0, 1)  # the generator's gradients stay for its own step
    module.step(0)
    if batch_idx % 2:
        module.optimizers()[1].zero_grad()
        module.backward_of(1)
        module.step(1)
    else:
        module.optimizers()[1].zero_grad()


def two_cadences(module, batch, batch_idx):
    if batch_idx % 2 == 0:
        module.optimizers()[1].zero_grad()
    module.optimizers()[0].zero_grad()
    module.backward_of(0, 1)
    module.step(0)
    if batch_idx % 2:
        module.step(1)
        module.seen[-1] /= 2  # of two micro-batches


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("play", [several_optimizers, without_gradients, n_critic, two_cadences])
def test_manual_optimization(make, play, precision):
    module = Manual(make, play)
    fit(module, AmpPrecision(precision), steps=8)
    assert len(module.seen) >= 4
    assert module.seen == pytest.approx([GRADIENT] * len(module.seen), rel=1e-3)


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_manual_optimization_with_a_clip_by_hand(make, precision):
    def clipped(module, batch, batch_idx):
        module.optimizers().zero_grad()
        module.backward_of(0)
        module.clip_gradients(module.optimizers(), 1.0, "norm")
        module.optimizers().step()
        module.seen.append(module.weights[0].grad.norm().item())

    module = Manual(make, clipped, count=1)
    fit(module, AmpPrecision(precision), steps=4)
    assert module.seen == pytest.approx([1.0] * 4, rel=1e-3)


class Automatic(LightningModule):
    """One weight; its gradient is :data:`GRADIENT` for each of 4 elements."""

    def __init__(self, make):
        super().__init__()
        self.weight, self.make = torch.nn.Parameter(torch.ones(4)), make

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum()

    def configure_optimizers(self):
        return self.make([self.weight])


class AfterTheStep(Callback):
    """Notes the norm of the gradients when a batch ends."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(module.weight.grad.norm().item())


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_automatic_optimization(make, precision, clip):
    after = AfterTheStep()
    options = {"gradient_clip_val": clip, "callbacks": [after]}
    fit(Automatic(make), AmpPrecision(precision), steps=4, data=batches(value=GRADIENT), **options)
    expected = 2 * GRADIENT if clip is None else clip
    assert after.seen == pytest.approx([expected] * 4, rel=1e-3)


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("clip", ["none", "written", "folded"])
def test_fabric(make, precision, clip):
    plugin = FabricAmpPrecision(precision, **({"init_scale": 2.0**10} if precision == "fp16" else {}))
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    net = torch.nn.Linear(4, 1, bias=False)
    model, optimizer = fabric.setup(net, make(net.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.full((1, 4), GRADIENT)).sum())
        if clip == "written":
            fabric.clip_gradients(net, optimizer, max_norm=1.0)
        elif clip == "folded":
            before = net.weight.grad.clone()
            assert plugin.clip_grad_norm_(optimizer, 1.0, fold=True) > 1.0
            assert torch.equal(net.weight.grad, before) is plugin.settings.one_pass
        optimizer.step()
        expected = 2 * GRADIENT if clip == "none" else 1.0
        assert net.weight.grad.norm().item() == pytest.approx(expected, rel=1e-3)


class Sum(torch.nn.Module):
    """A weight whose gradient is the input, for each of 4 elements."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, factor):
        return (self.weight * factor).sum()


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("clip", ["none", "written", "folded"])
@pytest.mark.parametrize("count", [1, 2])
def test_accelerate(make, precision, clip, count):
    accelerator = ours(precision=precision, fold_clip=clip == "folded")
    nets = [Sum() for _ in range(count)]
    prepared = accelerator.prepare(*nets, *[make(net.parameters()) for net in nets])
    models, optimizers = prepared[:count], prepared[count:]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(sum(model(torch.tensor(GRADIENT)) for model in models))
        for model, optimizer in zip(models, optimizers, strict=True):
            if clip != "none":
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            expected = 2 * GRADIENT if clip == "none" else 1.0
            assert model.weight.grad.norm().item() == pytest.approx(expected, rel=1e-3)
