"""Layers below 16 bits under FSDP2 and in code compiled by inductor: the same losses as whole and eager ones."""

import importlib.util
import json

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.precision import BELOW_16_BITS
from tests.formats import sharded
from tests.warm_processes import call_on_ranks

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    file = tmp_path_factory.mktemp("formats") / "losses.json"
    for rank in call_on_ranks(2, 300, sharded.main, file):
        assert rank.returncode == 0, rank.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", BELOW_16_BITS)
def test_fsdp2_computes_the_losses_of_the_whole_model_and_skips_the_same_step(seen, name) -> None:
    """The guard skips one poisoned batch, and both clip. The losses are equal to the bit."""
    whole, shards = (torch.tensor(losses) for losses in seen[name])
    assert whole.isfinite().sum() == 5
    assert whole[whole.isfinite()].tolist() == shards[shards.isfinite()].tolist()


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.*should not be instantiated", "ignore:Dynamo detected"
)
@pytest.mark.parametrize("name", BELOW_16_BITS)
def test_code_compiled_by_inductor_is_as_near_to_fp32_as_eager_code(name) -> None:
    """inductor keeps results between ops in float32, so a number may be rounded to another one of its format."""
    torch._dynamo.reset()

    def gradients(made, through=lambda net: net):
        torch.manual_seed(0)
        net = made(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        with amp_plugin.autocast("cpu", dtype=torch.bfloat16, enabled=made is converted):
            loss = (through(net)(x) - x).float().square().mean()
        loss.backward()
        return torch.cat([loss.detach().reshape(1), *(param.grad.flatten() for param in net.parameters())])

    def converted(net):
        return amp_plugin.convert(net, name, emulate=True)

    exact, eager, compiled = (
        gradients(nn.Sequential),
        gradients(converted),
        gradients(converted, torch.compile),
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    error = (eager - exact).norm()
    assert 0 < error < 0.3 * exact.norm()
    assert (compiled - exact).norm() == pytest.approx(error.item(), rel=0.1)
