"""The scaler on the CUDA kernels: emulated, they take the place of those that serve the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.kernels.cuda import register
from amp_plugin.kernels.cuda.operations import Operations
from tests.cuda_emulation.emulated_kernels import EmulatedDevice, compiler, object_folder

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")
OVERFLOWS = (3, 4, 9)


@pytest.fixture
def device(monkeypatch):
    """The emulated device; what it launches can be counted."""
    emulated = EmulatedDevice(object_folder())
    served = Operations(emulated)
    monkeypatch.setattr(register, "_device_of", lambda _: 0)
    monkeypatch.setattr(register, "_operations_of", lambda _: served)
    library = torch.library.Library("amp_plugin", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the CPU's kernels are overridden
        for name in register.OPS:
            library.impl(name, register._kernel(name), "CPU")
    yield emulated
    library._destroy()


def train(optimizer, clip):
    """Train on batches of which some overflow; return what each step came to, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    stepper = optimizer(model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.register(stepper, names=model)
    steps = []
    for i in range(12):
        x = torch.randn(32, 8)
        x[0, 0] = float("nan") if i in OVERFLOWS else x[0, 0]
        for half in x.chunk(2):
            scaler.scale(model(half).square().mean()).backward()
        norm = scaler.clip_grad_norm_(stepper, 0.5, fold=clip == "folded") if clip else torch.zeros(())
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        last = scaler.last_step(stepper)
        steps.append((last.skipped, str(last.overflow_report()), scaler.get_scale(), norm.item()))
    return steps, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), None),
        (lambda params: torch.optim.SGD(params, lr=0.1), "in place"),
        (lambda params: torch.optim.AdamW(params, lr=0.01, fused=True), None),
        (lambda params: torch.optim.AdamW(params, lr=0.01, fused=True), "in place"),
        (lambda params: torch.optim.AdamW(params, lr=0.01, fused=True), "folded"),
    ],
    ids=["SGD", "SGD, clipped", "fused AdamW", "fused AdamW, clipped", "fused AdamW, clip folded"],
)
def test_training_is_that_of_plain_torch(device, monkeypatch, optimizer, clip):
    ours, weights = train(optimizer, clip)
    assert {"finalise", "update_scale"} <= set(device.launches)
    launches = len(device.launches)
    monkeypatch.setattr(register, "_operations_of", lambda _: None)
    theirs, expected = train(optimizer, clip)
    assert len(device.launches) == launches
    assert [skipped for skipped, *_ in ours] == [i in OVERFLOWS for i in range(12)]
    for one, other in zip(ours, theirs, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], rel=1e-5, nan_ok=True)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
