"""fp8 by torchao's training, emulated on the CPU: losses of its own conversion under torch.autocast, bit for bit."""

import copy
import importlib.util

import pytest
import torch
from lightning.fabric import Fabric
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
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()))


class Module(Linear):
    def __init__(self, **options):
        super().__init__(**options)
        self.net = Net()


def batches(count=6):
    x = torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(1))
    return [(batch, batch.sum(1, keepdim=True)) for batch in x]


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


def by_trainer(net, clip):
    module = Module()
    module.net = net
    plugin = AmpPrecision("fp8", float8_config=emulated(pad_inner_dim=True), one_pass=False)
    fit(module, plugin, steps=6, data=DataLoader(batches(), batch_size=None), gradient_clip_val=clip)
    return module.losses


def trained(net, frame, optimizer, clip_norm):
    losses = []
    for x, y in batches():
        with frame.autocast():
            loss = nn.functional.mse_loss(net(x), y)
        frame.backward(loss)
        clip_norm()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_fabric(net, clip):
    plugin = FabricAmpPrecision("fp8", float8_config=emulated(pad_inner_dim=True), one_pass=False)
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    _, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return trained(net, fabric, optimizer, lambda: clip and plugin.clip_grad_norm_(optimizer, clip))


def by_accelerate(net, clip):
    handlers = [recipe(), AmpKwargs(one_pass=False)]
    accelerator = AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=handlers)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    params = list(net.parameters())
    losses = trained(net, accelerator, optimizer, lambda: clip and accelerator.clip_grad_norm_(params, clip))
    assert not accelerator.last_step(optimizer).skipped
    return losses


@needs_torchao
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("front", [by_trainer, by_fabric, by_accelerate])
def test_losses_are_torchaos(front, clip):
    net = Net()
    of_accelerate = front is by_accelerate  # whose recipe leaves the first and the last layer out
    config = emulated() if of_accelerate else emulated(pad_inner_dim=True)
    expected = by_torchao(copy.deepcopy(net), config, ("first",) if of_accelerate else (), clip)
    losses = front(net, clip)
    torch.testing.assert_close((losses, [*net.parameters()]), expected, rtol=0, atol=0)
    kinds = {name: type(layer).__name__ for name, layer in net.named_children()}
    first = "Linear" if of_accelerate else "Float8Linear"
    assert kinds == {"first": first, "norm": "LayerNorm", "second": "Float8Linear", "head": "Linear"}


# -- Lightning ----------------------------------------------------------------------------------


@needs_torchao
def test_modules_in_fp32_are_left_out(tmp_path):
    plugin = AmpPrecision("fp8", float8_config=emulated(), fp32_modules=["net.second"])

    def run(module, steps, **options):
        data = DataLoader(batches(), batch_size=None)
        return fit(module, plugin, steps, data, accumulate_grad_batches=2, **options)

    run(module := Module(), 2).save_checkpoint(tmp_path / "run.ckpt")
    kinds = type(module.net.first).__name__, type(module.net.second).__name__
    assert kinds == ("Float8Linear", "Linear")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Module().state_dict().keys()
    run(again := Module(), 3, ckpt_path=tmp_path / "run.ckpt")
    run(again, 4)  # converted once
    assert (plugin.scaler, plugin.precision) == (None, "bf16-mixed")


def in_accelerate_without_emulation():
    from accelerate.utils import AORecipeKwargs

    AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])


@needs_torchao
@pytest.mark.parametrize(
    "run",
    [
        lambda: fit(Module(), AmpPrecision("fp8"), data=DataLoader(batches(), batch_size=None)),
        in_accelerate_without_emulation,
    ],
)
def test_a_device_without_float8_is_refused(run):
    with pytest.raises(ValueError, match=r"'fp8'\): this cpu has no float8.*use 'bf16'.*emulate=True"):
        run()


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
@pytest.mark.parametrize("filtered", [True, False])
def test_accelerates_recipe_leaves_modules_in_fp32_out(filtered):
    own = {"module_filter_func": lambda module, name: name != "head"} if filtered else {}
    kwargs = [recipe(**own), AmpKwargs(fp32_modules=["second"])]
    accelerator = AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=kwargs)
    net = accelerator.prepare(Net())
    assert type(net.second).__name__ != "Float8Linear"
    assert (type(net.first).__name__ == "Float8Linear") == filtered
