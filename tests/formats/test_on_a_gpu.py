"""Does float8 on a GPU that supports it train as torchao's own conversion does, and as the emulation
predicts?
"""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from amp_plugin import autocast, convert
from amp_plugin.hardware import hardware_of
from tests.host_device import host_device


def has_float8():
    return torch.cuda.is_available() and not host_device.LOADED and bool(hardware_of("cuda").computes("fp8"))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    pytest.mark.skipif(not has_float8(), reason="needs a GPU with float8"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao"),
]
RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}


def network():
    torch.manual_seed(0)
    layers = nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256), nn.Linear(256, 1)
    return nn.Sequential(*layers).cuda()


def losses_of(net, region, *, steps=6):
    """Train, and return the loss of each step."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-4), []
    batches = torch.randn(steps, 128, 256, generator=torch.Generator().manual_seed(1)).cuda()
    for batch in batches:
        with region():
            loss = nn.functional.mse_loss(net(batch).float(), batch.mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_torchao_s_own_conversion(name, compiled):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    ours, theirs = network(), network()
    convert(ours, name)
    convert_to_float8_training(
        theirs,
        config=Float8LinearConfig.from_recipe_name(RECIPES[name]),
        module_filter_fn=lambda _, path: path in {"0", "2"},
    )
    assert [type(layer) for layer in ours] == [type(layer) for layer in theirs]
    if compiled:
        ours, theirs = torch.compile(ours), torch.compile(theirs)
    found = losses_of(ours, lambda: autocast("cuda", dtype=torch.bfloat16))
    assert found == losses_of(theirs, lambda: torch.autocast("cuda", dtype=torch.bfloat16))
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_emulation_is_close_to_what_the_hardware_computes(name):
    """Both round alike, but the hardware adds products in another order and with fewer bits."""
    fast, slow = network(), network()
    before = copy.deepcopy(fast)
    convert(fast, name)
    convert(slow, name, emulate=True)
    batch = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).cuda()
    with autocast("cuda", dtype=torch.bfloat16):
        outputs = [net[:3](batch).float() for net in (fast, slow, before)]
    fast_output, slow_output, exact = outputs
    rounding = (slow_output - exact).norm() / exact.norm()
    assert 1e-3 < rounding < 0.1
    assert (fast_output - slow_output).norm() / exact.norm() < 0.2 * rounding
