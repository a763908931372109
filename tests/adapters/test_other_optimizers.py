"""Optimizers of other projects give exact results under a loss scale, and a skipped step changes nothing."""

import importlib
import importlib.util

import pytest
import torch
from torch import nn

from amp_plugin import GradScaler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPTIMIZERS = {
    "schedule-free AdamW": ("schedulefree", "AdamWScheduleFree", {"lr": 1e-2, "warmup_steps": 2}),
    "prodigy": ("prodigyopt", "Prodigy", {"lr": 1.0}),
    "8-bit AdamW": ("torchao.optim", "AdamW8bit", {"lr": 1e-2, "block_size": 64}),
}


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    package, name, options = OPTIMIZERS[request.param]
    if not importlib.util.find_spec(package.partition(".")[0]):
        pytest.skip(f"needs {package}")
    kind = getattr(importlib.import_module(package), name)
    with torch.compiler.set_stance("force_eager"):  # torchao's optimizer compiles its step
        yield lambda params: switched(kind(params, **options))


def switched(optimizer, mode="train"):
    """Switch a schedule-free optimizer to training or evaluation mode. Other optimizers have no modes."""
    getattr(optimizer, mode, lambda: None)()
    return optimizer


def tensors_of(optimizer):
    """Return all tensors of an optimizer's state; 8-bit tensors are converted to fp32."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [value.dequantize() if hasattr(value, "codes") else value for value in kept]


BATCHES = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(0))


def trained(make, step_on):
    """Train a layer whose optimizer has 8-bit state.

    ``step_on(optimizer, loss, number)`` runs one iteration.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = make(net.parameters())
    for number, batch in enumerate(BATCHES):
        step_on(net, optimizer, lambda factor=1.0, batch=batch: net(batch).square().mean() * factor, number)
        optimizer.zero_grad()
    switched(optimizer, "eval")
    return [*net.parameters(), *tensors_of(optimizer)]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_scaled_by_powers_of_two_it_trains_as_unscaled(make, clip):
    """Before each good batch comes one that overflows. It leaves no trace."""
    # so that each optimizer's own step runs, with its own bits
    scaler = GradScaler("cpu", init_scale=2.0**20, one_pass=False)

    def scaled(net, optimizer, loss, number):
        for factor in (float("inf"), 1.0):
            scaler.scale(loss(factor)).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, clip)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step(optimizer).skipped == (factor != 1)
            if factor != 1:
                optimizer.zero_grad()

    def plain(net, optimizer, loss, number):
        loss().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()

    # our norm differs from torch's in the last bit
    exact = {"rtol": 1e-4, "atol": 1e-5} if clip else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(trained(make, scaled), trained(make, plain), **exact)
