"""A model with stored weights and its fp32 twin get the same gradients and are compared bit for bit."""

import copy

import torch
from torch import nn
from torch.optim import SGD, AdamW

from amp_plugin import store_weights

TORCHS = {
    "SGD": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "SGD-nesterov": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": lambda p: AdamW(p, lr=1e-3, foreach=False),
    "AdamW-foreach": lambda p: AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    # Its constructor creates optimizer state.
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, initial_accumulator_value=0.1),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def give_gradients(step, *models, seed=0):
    """Give models the same gradients: float32 tensors with values that bfloat16 can represent."""
    for model in models:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16().float()
            param.grad = grad.to(param.grad_dtype)


def twins(weights="bf16", make=network, **options):
    """Return a float32 model, a copy with stored weights, and the store."""
    reference, stored = make(), make()
    return reference, stored, store_weights(stored, weights=weights, **options)


def stepped_twins(make, weights="bf16"):
    """Return a pair of twins, and their optimizers, made by ``make(params)``."""
    reference, stored, store = twins(weights)
    optimizers = [make(model.parameters()) for model in (reference, stored)]
    store.add(optimizers[1])
    return (reference, stored), optimizers


def exact(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    torch.testing.assert_close(exact(one), exact(other), rtol=0, atol=0)


def step(number, models, optimizers):
    give_gradients(number, *models)
    for optimizer in optimizers:
        optimizer.step()


def train(models, optimizers, count, *, first=0):
    """Take steps with the same gradients."""
    for number in range(first, first + count):
        step(number, models, optimizers)


@torch.no_grad()
def away_from_ties(model):
    """Change weights that are exactly halfway between two bfloat16 numbers.

    Pairs round these away from zero, autocast rounds them to even.
    """
    for param in model.parameters():
        bits = param.view(torch.int32)
        bits.add_((bits & 0xFFFF) == 0x8000)


def load_state_dicts(saved, resumed):
    for part, other in zip(saved, resumed, strict=True):
        other.load_state_dict(copy.deepcopy(part.state_dict()))


def assert_steps_and_resumes(make, resume=load_state_dicts):
    """Assert that a model with stored weights trains like its float32 twin.

    Also assert it for a model that is loaded from a checkpoint of the stored one.
    """
    (reference, stored), optimizers = stepped_twins(lambda params: make(params, lr=1e-3))
    train((reference, stored), optimizers, 10)
    resumed = network(3)
    optimizers.append(make(resumed.parameters(), lr=1.0))
    store_weights(resumed, optimizers[2])
    resume((stored, optimizers[1]), (resumed, optimizers[2]))
    train((reference, stored, resumed), optimizers, 10, first=10)
    assert_same(reference, stored)
    assert_same(reference, resumed)
