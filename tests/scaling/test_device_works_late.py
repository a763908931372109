"""If the device works late, the loss scale is still read after it was computed, on the stream that computed
it.
"""

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
    """Delay work as long as possible on the host device. A real device is late by itself."""
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        yield


def delay(cycles=50_000_000):
    """Keep the current stream busy for a while."""
    torch.cuda._sleep(cycles)


class OnTheHost:
    """A model whose parameters, gradients and optimizer are on the host, as in FSDP2's CPU offload."""

    def __init__(self, optimizer, device, **options):
        torch.manual_seed(0)
        self.weight, self.device = torch.nn.Parameter(torch.randn(64)), device
        self.optimizer = optimizer([self.weight], lr=0.1, **options)
        self.scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)

    def train(self, batches, clip):
        for batch in batches.to(self.device):
            self.optimizer.zero_grad()
            delay()
            loss = self.scaler.scale((self.weight.to(self.device) * batch).square().mean())
            delay()
            loss.backward()
            if clip == "in the step":
                self.scaler.clip_and_step(self.optimizer, 0.1)
            else:
                if clip:
                    self.scaler.clip_grad_norm_(self.optimizer, 0.1)
                self.scaler.step(self.optimizer)
            self.scaler.update()
        assert self.scaler.skipped_steps() == 1
        return self.weight


@pytest.mark.parametrize("clip", [None, "in place", "in the step"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})],
    ids=["unfused", "fused"],
)
def test_gradients_on_the_host_under_a_scale_on_the_device(optimizer, options, clip):
    batches = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    batches[2, 3] = float("inf")
    offloaded, right = (OnTheHost(optimizer, where, **options) for where in ("cuda", "cpu"))
    torch.testing.assert_close(
        offloaded.train(batches, clip), right.train(batches, clip), rtol=1e-5, atol=1e-6
    )


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


def test_whether_a_step_has_landed_is_waited_for_unless_asked_otherwise():
    weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    delay(cycles=2_000_000_000)  # a second: the host takes a while if other programs use its cores
    scaler.step(optimizer)
    assert scaler.landed(optimizer, wait=False)  # the host does not know yet
    assert not scaler.landed(optimizer)
