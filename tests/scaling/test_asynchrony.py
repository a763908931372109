"""The device works late: the loss scale is read where it has arrived, and on the stream it was made on."""

from __future__ import annotations

import contextlib

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.options import LossScaleOptions
from amp_plugin.scaling.loss_scale import LossScale
from tests.host_device import host_device

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def late():
    """Work that is as late as can be, on the device made of host memory; a real one is late by itself."""
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        yield


def delay():
    """Let the current stream be busy for a while."""
    torch.cuda._sleep(50_000_000)


class OnTheHost:
    """A model whose parameters, gradients and optimizer are on the host, as FSDP2's CPU offload has them."""

    def __init__(self, optimizer, scale=2.0**10, **options):
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(64))
        self.optimizer = optimizer([self.weight], lr=0.1, **options)
        self.scaler = GradScaler("cuda", init_scale=scale, growth_interval=2)

    def step(self, batch, clip):
        self.optimizer.zero_grad()
        delay()
        loss = self.scaler.scale((self.weight.cuda() * batch).square().mean())
        delay()
        loss.backward()
        if clip:
            self.scaler.clip_grad_norm_(self.optimizer, 0.1, fold=clip == "folded")
        self.scaler.step(self.optimizer)
        self.scaler.update()


def reference(optimizer, batches, clip, **options):
    """The same on the host alone, without a loss scale."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64))
    steps = optimizer([weight], lr=0.1, **options)
    for batch in batches:
        steps.zero_grad()
        (weight * batch).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([weight], 0.1)
        if weight.grad.isfinite().all():
            steps.step()
    return weight


@pytest.mark.parametrize("clip", [None, "in place", "folded"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})],
    ids=["unfused", "fused"],
)
def test_gradients_on_the_host_under_a_scale_on_the_device(optimizer, options, clip):
    batches = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    batches[2, 3] = float("inf")
    offloaded = OnTheHost(optimizer, **options)
    for batch in batches.cuda():
        offloaded.step(batch, clip)
    expected = reference(optimizer, batches, clip, **options)
    torch.testing.assert_close(offloaded.weight, expected, rtol=1e-5, atol=1e-6)
    assert offloaded.scaler.skipped_steps() == 1


@pytest.mark.parametrize("inverse", [False, True])
def test_what_is_derived_from_a_scale_is_handed_out_on_its_own_stream(inverse):
    loss_scale = LossScale(LossScaleOptions(init_scale=4.0))
    loss_scale.materialize(torch.device("cuda", 0))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        delay()
        loss_scale.snapshot(inverse=inverse)
    assert loss_scale.snapshot(inverse=inverse).item() == (0.25 if inverse else 4.0)
    torch.cuda.synchronize()
