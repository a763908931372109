"""In each entry point, gradients after a step are unscaled: users log them between ``step()`` and
``zero_grad()``.
"""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule

from amp_plugin import AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import ours
from tests.adapters.lightning_models import QUIET, batches, fit

pytestmark = QUIET
GRADIENT = 3.0  # the gradient of each of 4 elements
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def norm(param):
    return param.grad.norm().item()


# -- several optimizers in manual optimization ----------------------------------------------------


class Manual(LightningModule):
    """A module with several weights and one optimizer for each.

    ``play`` is its training step, which records gradients in ``seen``.
    """

    def __init__(self, make, play, count=2):
        super().__init__()
        self.automatic_optimization = False
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4)) for _ in range(count))
        self.make, self.play, self.seen = make, play, []

    def training_step(self, batch, batch_idx):
        self.play(self, batch_idx)

    def configure_optimizers(self):
        return [self.make([weight]) for weight in self.weights]

    def zero(self, *numbers):
        for number in numbers:
            self.optimizers()[number].zero_grad()

    def backward_of(self, *numbers):
        self.manual_backward(sum((self.weights[i] * GRADIENT).sum() for i in numbers))

    def step(self, number, micro_batches=1):
        self.optimizers()[number].step()
        self.seen.append(norm(self.weights[number]) / 2 / micro_batches)


def several_optimizers(module, batch_idx):
    module.zero(0, 1)
    module.backward_of(0, 1)
    module.step(0)
    module.step(1)


def n_critic(module, batch_idx):
    module.zero(0)
    module.backward_of(0, 1)  # adds to the generator's gradients, which its own step uses later
    module.step(0)
    module.zero(1)
    if batch_idx % 2:
        module.backward_of(1)
        module.step(1)


def two_cadences(module, batch_idx):
    module.zero(*((0,) if batch_idx % 2 else (0, 1)))
    module.backward_of(0, 1)
    module.step(0)
    if batch_idx % 2:
        module.step(1, micro_batches=2)


@each_optimizer
@pytest.mark.parametrize("play", [several_optimizers, n_critic, two_cadences])
def test_several_optimizers(make, play, precision):
    module = Manual(make, play)
    fit(module, AmpPrecision(precision), steps=8)
    assert len(module.seen) >= 4
    assert module.seen == pytest.approx([GRADIENT] * len(module.seen), rel=1e-3)


# -- one optimizer, clipped or not ----------------------------------------------------------------


def by_hand(make, precision, clip):
    def play(module, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.backward_of(0)
        if clip == "written":
            module.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        module.seen.append(norm(module.weights[0]))

    module = Manual(make, play, count=1)
    fit(module, AmpPrecision(precision), steps=4)
    return module.seen


class AfterTheStep(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(norm(module.weights[0]))


class Automatic(Manual):
    def __init__(self, make):
        super().__init__(make, None, count=1)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return (self.weights[0] * batch).sum()


def trainer(make, precision, clip):
    """Train with the Trainer, which does the clip as part of the step if possible."""
    after = AfterTheStep()
    options = {"gradient_clip_val": None if clip == "none" else 1.0, "callbacks": [after]}
    fit(Automatic(make), AmpPrecision(precision), steps=4, data=batches(value=GRADIENT), **options)
    return after.seen


def clipped(weight, clip, clip_norm):
    """Clip in place, unless ``clip`` is "none". Check that the gradient changed exactly if it was clipped."""
    before = weight.grad.clone()
    if clip != "none":
        assert clip_norm() > 1.0
    assert torch.equal(weight.grad, before) is (clip == "none")


def fabric(make, precision, clip):
    plugin = FabricAmpPrecision(precision, **({"init_scale": 2.0**10} if precision == "fp16" else {}))
    frame = Fabric(plugins=[plugin], accelerator="cpu")
    net, seen = torch.nn.Linear(4, 1, bias=False), []
    model, optimizer = frame.setup(net, make(net.parameters()))

    def clip_norm():
        return frame.clip_gradients(net, optimizer, max_norm=1.0)

    for _ in range(3):
        optimizer.zero_grad()
        frame.backward(model(torch.full((1, 4), GRADIENT)).sum())
        clipped(net.weight, clip, clip_norm)
        optimizer.step()
        seen.append(norm(net.weight))
    return seen


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, factor):
        return (self.weight * factor).sum()


def accelerate(make, precision, clip):
    accelerator = ours(precision=precision.replace("fp32", "no"))
    nets, seen = [Sum(), Sum()], []
    *models, first, second = accelerator.prepare(*nets, *[make(net.parameters()) for net in nets])
    for _ in range(3):
        first.zero_grad(), second.zero_grad()
        accelerator.backward(sum(model(torch.tensor(GRADIENT)) for model in models))
        for model, optimizer in zip(models, (first, second), strict=True):
            clipped(
                model.weight, clip, lambda model=model: accelerator.clip_grad_norm_(model.parameters(), 1.0)
            )
            optimizer.step()
            seen.append(norm(model.weight))
    return seen


@each_optimizer
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("front", "clip"),
    [(front, clip) for front in (by_hand, trainer, fabric, accelerate) for clip in ("none", "written")],
)
def test_one_optimizer(make, precision, clip, front):
    seen = front(make, precision, clip)
    assert seen == pytest.approx([2 * GRADIENT if clip == "none" else 1.0] * len(seen), rel=1e-3)
