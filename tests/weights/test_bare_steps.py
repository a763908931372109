"""``optimizer.step()`` without a scaler must not decompress all states at the same time."""

import pytest
import torch

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights import compressed_state

pytestmark = pytest.mark.native

KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def training(kind, state, weights="fp32"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = KINDS[kind](model.parameters())
    store_weights(model, optimizer, weights=weights, state=state)
    return model, optimizer


def backward(model, optimizer):
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()


@pytest.fixture
def decompressed(monkeypatch):
    """Return how often a state was decompressed."""
    calls, decompress = [], compressed_state.decompress
    monkeypatch.setattr(compressed_state, "decompress", lambda state: calls.append(1) or decompress(state))
    return calls


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_step_is_the_scalers_step_in_one_pass(kind, state, weights, decompressed):
    bare, scaled = training(kind, state, weights), training(kind, state, weights)
    scaler = GradScaler("cpu", enabled=False)
    for seed in range(4):
        for model, optimizer in (bare, scaled):
            torch.manual_seed(seed)
            backward(model, optimizer)
        grads = [param.grad for param in bare[0].parameters()]
        bare[1].step()
        scaler.step(scaled[1])
        assert [param.grad for param in bare[0].parameters()] == grads, "the same tensors as before"
        assert all(map(torch.equal, bare[0].state_dict().values(), scaled[0].state_dict().values()))
    assert scaler.last_step(scaled[1]).one_pass
    first_step_of_torch = kind == "momentum"  # the first step creates the buffers
    assert len(decompressed) <= 2 * first_step_of_torch


def test_one_pass_false_keeps_the_optimizers_own_step(decompressed):
    model, optimizer = training("adamw", "8bit")
    scaler = GradScaler("cpu", enabled=False, one_pass=False)
    backward(model, optimizer)
    scaler.step(optimizer)
    assert decompressed
