"""Regions on a CUDA device: threads of autograd, and graph capture."""

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.kernels.build import native_core

pytestmark = [pytest.mark.gpu, pytest.mark.native]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()


def test_backward_threads_follow_no_region_opened_outside():
    model, seen = make_model(), []
    x = torch.randn(16, 64, device="cuda")

    def grads(whole):
        model.zero_grad()
        with amp_plugin.autocast("cuda", enabled=whole):
            with amp_plugin.autocast("cuda"):
                hidden = model[0](x)
                hidden.register_hook(lambda g: seen.append((g.float() @ g.float().t()).dtype))
                loss = model[3](model[2](hidden)).float().square().sum()
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for a, b in zip(grads(False), grads(True), strict=True):
        assert torch.equal(a, b)
    assert seen == [torch.float32, torch.float32]


# torch warms up on one stream and captures on another
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_graphed_callables_equal_eager():
    x = torch.randn(16, 64, device="cuda")
    eager, graphed = make_model(), make_model()
    with amp_plugin.autocast("cuda", dtype=torch.bfloat16):
        graphed = torch.cuda.make_graphed_callables(graphed, (x,))
        for _ in range(3):
            ours, theirs = graphed(x), eager(x)
            assert torch.equal(ours, theirs)
            with torch.no_grad():
                for p, q in zip(graphed.parameters(), eager.parameters(), strict=True):
                    p.mul_(1.5)
                    q.mul_(1.5)
    assert native_core().extension.kept_cast_count() == 0


def test_a_capture_uses_no_cast_that_was_kept_before():
    model, x, stream = make_model(), torch.randn(16, 64, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with amp_plugin.autocast("cuda", dtype=torch.bfloat16), torch.no_grad(), torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        model(x)
        assert native_core().extension.kept_cast_count()
        with torch.cuda.graph(graph, stream=stream):
            output = model(x)
        for param in model.parameters():
            param.mul_(1.5)
        graph.replay()
        assert torch.equal(output, model(x))
