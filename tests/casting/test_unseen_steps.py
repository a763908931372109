"""Steps that no hook and no version counter shows: casts kept from before them are not used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.casting.cast_cache import CastCache

pytestmark = pytest.mark.native
BF16 = torch.bfloat16
BATCHES = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class ThroughData(torch.optim.Optimizer):
    """Writes weights as many an older optimizer does: no version counter moves."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=0.1)


OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "through data": ThroughData,
}


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()


def make_model(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


def loss_of(model, batch, cache=None):
    with amp_plugin.autocast(batch.device.type, dtype=BF16, cache=cache):
        return model(batch).float().square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_is_seen(name, backend):
    model, cache = make_model(), CastCache()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = torch.compile(optimizer.step, backend=backend)
    for batch in BATCHES:
        loss = loss_of(model, batch, cache)
        assert torch.equal(loss, loss_of(model, batch)), "casts of older weights"
        loss.backward()
        step()
        optimizer.zero_grad()
    assert cache.casts == 4 * len(BATCHES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalidate_in_compiled_code_is_kept(backend):
    model, cache = make_model(), CastCache()

    @torch.compile(backend=backend, fullgraph=True)
    def average(weight, other):
        weight.lerp_(other, 0.5)
        amp_plugin.invalidate()

    for _ in range(2):
        loss_of(model, BATCHES[0], cache)
        average(model[0].weight.data, torch.ones(16, 8))
        assert torch.equal(loss_of(model, BATCHES[0], cache), loss_of(model, BATCHES[0]))


def test_a_windows_end_is_announced():
    """Whoever owns the loop needs no hook and no counter to be right, and every window casts once."""
    model, cache = make_model(), CastCache()
    for window in range(3):
        for batch in BATCHES:
            assert torch.equal(loss_of(model, batch, cache), loss_of(model, batch))
        assert cache.casts == 4 * (window + 1)
        for param in model.parameters():
            param.data.numpy()[:] *= 0.5  # a step that nothing shows
        cache.end_window()


def captured(step, device):
    """Run a step while the device's stream records it, and return what replays it."""
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.gpu
@pytest.mark.parametrize("announced", [False, True])
def test_a_step_in_a_replayed_graph(announced):
    """Nothing shows a replay: then a region casts anew, or the window if its end is announced."""
    model, cache = make_model("cuda"), CastCache()
    batches = BATCHES.cuda()
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    replay = captured(torch.optim.SGD(model.parameters(), lr=0.1).step, "cuda")
    if announced:
        cache.end_window()
    before = cache.casts
    for _ in range(3):
        for batch in batches:
            assert torch.equal(loss_of(model, batch, cache), loss_of(model, batch))
        replay()
        if announced:
            cache.end_window()
    regions = 3 if announced else 3 * len(batches)
    assert cache.casts - before == 4 * regions
