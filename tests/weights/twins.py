"""A model with stored weights next to its fp32 twin: made alike, given the same gradients, compared bit for bit."""

import torch
from torch import nn

from amp_plugin import store_weights


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def give_gradients(step, *models, seed=0):
    """Give models the same gradients, bfloat16 numbers in float32."""
    for model in models:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16().float()
            param.grad = grad.to(param.grad_dtype)


def twins(weights="bf16", make=network):
    """Return a model, its stored twin, and the store."""
    reference, stored = make(), make()
    return reference, stored, store_weights(stored, weights=weights)


def exact(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    one, other = exact(one), exact(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def step(number, models, optimizers):
    give_gradients(number, *models)
    for optimizer in optimizers:
        optimizer.step()
