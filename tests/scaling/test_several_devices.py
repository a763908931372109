"""A model on two devices with one scaler: gradients on both devices are unscaled and checked together."""

import itertools

import pytest
import torch
from torch import nn

import amp_plugin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
OVERFLOWS = [3, 4]
STEPS = 8


@pytest.fixture(autouse=True, params=[0, 1], ids="current device {}".format)
def current_device(request):
    torch.cuda.set_device(request.param)
    yield
    torch.cuda.set_device(0)


class Split(nn.Module):
    """Two layers on different devices."""

    def __init__(self, devices):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16).to(devices[0]), nn.Linear(16, 4).to(devices[1])

    def forward(self, x):
        hidden = self.first(x.to(self.first.weight.device)).relu()
        return self.second(hidden.to(self.second.weight.device))


def train(amp, devices, *, fused, clip):
    """Train with some steps that overflow. Return the weights, and the loss scale after each step."""
    model, scales = Split(devices), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=generator)
        x[0, 0] = torch.inf if step in OVERFLOWS else x[0, 0]
        with amp.autocast("cuda", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if clip == "ours":
            scaler.clip_grad_norm_(optimizer, 0.1)
        elif clip == "torch's":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [p.detach().cpu() for p in model.parameters()], scales


@pytest.mark.parametrize("devices", list(itertools.permutations(["cuda:0", "cuda:1"])), ids=str)
@pytest.mark.parametrize("clip", [None, "torch's", "ours"])
def test_two_devices_train_as_one(devices, fused, clip):
    one, scales = train(amp_plugin, ["cuda:1", "cuda:1"], fused=fused, clip=clip)
    two, as_before = train(amp_plugin, devices, fused=fused, clip=clip)
    assert as_before == scales
    assert [step for step in range(1, STEPS) if scales[step] < scales[step - 1]] == OVERFLOWS
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
