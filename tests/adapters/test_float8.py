"""fp8 by torchao's training, emulated on the CPU: losses of its own conversion under torch.autocast, bit for bit."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin import AmpAccelerator, AmpKwargs, AmpPrecision, FabricAmpPrecision
from amp_plugin.adapters import float8
from tests.adapters.lightning_models import QUIET, Linear, fit

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao")]


def emulated(**options):
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, **options)


class Net(nn.Module):
    """Two layers that float8 takes, a norm, and a head that it does not take."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()))


class Module(Linear):
    def __init__(self, **options):
        super().__init__(**options)
        torch.manual_seed(0)
        self.net = Net()


def batches(count=6):
    x = torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(1))
    return [(batch, batch.sum(1, keepdim=True)) for batch in x]


def loader():
    return DataLoader(batches(), batch_size=None)


def by_torchao(net, config, left_out=(), clip=None):
    """Train with torchao's conversion under torch.autocast; returns losses and weights."""
    from torchao.float8 import convert_to_float8_training

    def is_meant(module, name):
        return not (module.in_features % 16 or module.out_features % 16) and name not in left_out

    net = convert_to_float8_training(net, config=config, module_filter_fn=is_meant)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in net.parameters()]


# -- Lightning ----------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("recipe", [{}, {"pad_inner_dim": True}])
def test_losses_are_torchaos(clip, recipe):
    module = Module()
    expected = by_torchao(copy.deepcopy(module.net), emulated(**recipe), clip=clip)
    fit(
        module,
        AmpPrecision("fp8", float8_config=emulated(**recipe), one_pass=False),
        steps=6,
        data=loader(),
        gradient_clip_val=clip,
    )
    torch.testing.assert_close((module.losses, [*module.parameters()]), expected, rtol=0, atol=0)
    kinds = {name: type(layer).__name__ for name, layer in module.net.named_children()}
    assert kinds == {"first": "Float8Linear", "norm": "LayerNorm", "second": "Float8Linear", "head": "Linear"}


@needs_torchao
def test_modules_in_fp32_are_left_out(tmp_path):
    module = Module()
    plugin = AmpPrecision("fp8", float8_config=emulated(), fp32_modules=["net.second"])
    trainer = fit(module, plugin, steps=2, data=loader(), accumulate_grad_batches=2)
    assert type(module.net.first).__name__ == "Float8Linear"
    assert type(module.net.second).__name__ != "Float8Linear"
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Module().state_dict().keys()
    again = Module()
    plugin = AmpPrecision("fp8", float8_config=emulated(), fp32_modules=["net.second"])
    fit(again, plugin, steps=3, data=loader(), ckpt_path=tmp_path / "run.ckpt", accumulate_grad_batches=2)
    fit(again, plugin, steps=4, data=loader())  # converted once
    assert plugin.scaler is None
    assert plugin.precision == "bf16-mixed"


@needs_torchao
def test_fabric_converts_too():
    from lightning.fabric import Fabric

    module = Module()
    expected = by_torchao(copy.deepcopy(module.net), emulated())
    plugin = FabricAmpPrecision("fp8", float8_config=emulated(), one_pass=False)
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    net, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.net.parameters(), lr=1e-2))
    losses = []
    for x, y in batches():
        with fabric.autocast():
            loss = nn.functional.mse_loss(net.module(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.testing.assert_close((losses, [*module.net.parameters()]), expected, rtol=0, atol=0)


@needs_torchao
def test_a_device_without_float8_is_refused():
    with pytest.raises(
        ValueError, match=r"AmpPrecision\('fp8'\): this cpu has no float8.*use 'bf16'.*emulate=True"
    ):
        fit(Module(), AmpPrecision("fp8"), data=loader())


@needs_torchao
def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no Linear layer .* multiples of 16.*use 'bf16'"):
        fit(Linear(), AmpPrecision("fp8", float8_config=emulated()))


@needs_torchao
def test_recipes_have_names():
    assert AmpPrecision("fp8", float8_config="rowwise").settings.float8_config is not None
    with pytest.raises(
        ValueError, match="float8_config='rows' is not allowed; give .* 'tensorwise', 'rowwise'"
    ):
        AmpPrecision("fp8", float8_config="rows")


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_without_torchao(cls, monkeypatch):
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ImportError, match=rf"{cls.__name__}\('fp8'\) needs torchao.*pip install .*or use 'bf16'"
    ):
        cls("fp8")


# -- Accelerate ---------------------------------------------------------------------------------


def recipe(**options):
    from accelerate.utils import AORecipeKwargs

    return AORecipeKwargs(config=emulated(), **options)


@needs_torchao
@pytest.mark.parametrize("clip", [None, 0.5])
def test_accelerates_recipe_keeps_our_clipping(clip):
    net = Module().net
    expected = by_torchao(
        copy.deepcopy(net), emulated(), left_out=("first",), clip=clip
    )  # the first and the last
    accelerator = AmpAccelerator(
        mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe(), AmpKwargs(one_pass=False)]
    )
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    assert type(net.second).__name__ == "Float8Linear"
    losses = []
    for x, y in batches():
        with accelerator.autocast():
            loss = nn.functional.mse_loss(net(x), y)
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result = accelerator.last_step(optimizer)
    assert not result.skipped
    assert result.norm is not None or clip is None
    torch.testing.assert_close((losses, [*net.parameters()]), expected, rtol=0, atol=0)


@needs_torchao
@pytest.mark.parametrize("filtered", [True, False])
def test_accelerates_recipe_leaves_modules_in_fp32_out(filtered):
    own = {"module_filter_func": lambda module, name: name != "head"} if filtered else {}
    kwargs = [recipe(**own), AmpKwargs(fp32_modules=["second"])]
    accelerator = AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=kwargs)
    net = accelerator.prepare(Net())
    assert type(net.second).__name__ != "Float8Linear"
    assert (type(net.first).__name__ == "Float8Linear") == filtered


@needs_torchao
def test_accelerate_without_float8_arithmetic():
    from accelerate.utils import AORecipeKwargs

    with pytest.raises(
        ValueError, match=r"mixed_precision='fp8'\): this cpu has no float8 arithmetic.*use 'bf16'"
    ):
        AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])
