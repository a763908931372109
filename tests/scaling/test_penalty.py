"""Gradients of gradients equal those of float32 autograd.

They need no host sync, and are computed outside autocast.
"""

import math

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import grad, gradient_penalty


def critic():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def wgan(model, x):
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


def l2(model, x):
    grads = torch.autograd.grad(model(x).sum(), [*model.parameters()], create_graph=True)
    return sum(g.square().sum() for g in grads)


@pytest.mark.parametrize(("kind", "oracle"), [("wgan-gp", wgan), ("l2", l2)])
@pytest.mark.parametrize("low", [False, True])
def test_the_penalty_and_its_gradients(kind, oracle, low):
    model, x = critic(), torch.randn(8, 5, requires_grad=True)
    params = [p for p in model.parameters() if kind == "l2" or p is not model[2].bias]
    right = oracle(model, x)
    expected = torch.autograd.grad(right, params, materialize_grads=True)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", torch.float16, enabled=low):
        sources = x if kind == "wgan-gp" else list(model.parameters())
        penalty = gradient_penalty(model(x), sources, scaler=scaler, kind=kind)
    assert penalty.dtype is torch.float32
    tolerance = {"rtol": 5e-2, "atol": 5e-3} if low else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(penalty, right, **tolerance)
    scaler.scale(penalty).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    for param, grad_of_it in zip(params, expected, strict=True):
        ours = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(ours, grad_of_it, **tolerance)


def test_small_gradients_survive_only_scaled():
    model = torch.nn.Linear(4, 1, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    results = {}
    for name, scaler in (("scaled", GradScaler("cpu")), ("unscaled", None)):
        with torch.autocast("cpu", torch.float16):
            loss = (model(x) * 1e-4).float().sum() * 1e-4
        (results[name],) = grad(loss, x, scaler=scaler)
    exact = (model.weight * 1e-8).expand(2, 4)
    assert torch.allclose(results["scaled"], exact, rtol=2e-2, atol=0)
    assert not torch.allclose(results["unscaled"], exact, rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", ["l2", "wgan-gp"])
def test_no_host_sync_and_no_autocast(kind, forbid_host_syncs):
    model, x = critic(), torch.randn(8, 5, requires_grad=True)
    regions = []
    model[0].register_full_backward_hook(lambda *_: regions.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.float16), forbid_host_syncs():
        gradient_penalty(model(x), x, scaler=GradScaler("cpu"), kind=kind)
    assert regions == [False]


def test_an_overflow_is_noted_for_the_next_update():
    scaler = GradScaler("cpu", init_scale=8.0)
    x = torch.ones(2, requires_grad=True)
    grad((x * 3.0).sum() * math.inf, x, scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_gradients_already_there_are_left_alone(weights):
    one = weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(3.0)).backward()
    scaler.unscale_(one.optimizer)
    grad(one.loss(4.0), one.params, scaler=scaler, create_graph=True)
    assert one.grad == 3.0
