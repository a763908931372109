"""Adapters own the accumulation window: each casts every weight once, also where no hook sees the step."""

import pytest
import torch

from amp_plugin.adapters.lightning import AmpPrecision
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import QUIET, Linear, fit, regression

pytestmark = [pytest.mark.native, *QUIET]


class Unseen(torch.optim.Optimizer):
    """Runs no step hook and writes weights where no version counter moves, as a replayed graph does."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.detach().numpy()[:] -= 0.05 * param.grad.numpy()
        return loss

    step.hooked = True  # torch then wraps no hooks around it


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


def by_trainer(*, keep):
    model = Linear(optimizer=lambda params, lr: Unseen(params))
    fit(model, AmpPrecision("bf16", cast_cache=keep), 4, regression(), accumulate_grad_batches=2)
    return weights_of(model)


def by_accelerator(*, keep):
    accelerator = ours(steps=2, precision="bf16", cast_cache=keep)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, Unseen(model.parameters()))
    for batch in torch.randn(8, 4, 8):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    reset()
    return weights_of(model)


@pytest.mark.parametrize("train", [by_trainer, by_accelerator])
def test_each_window_casts_anew(train):
    kept, cast = train(keep=True), train(keep=False)
    assert all(map(torch.equal, kept, cast))
