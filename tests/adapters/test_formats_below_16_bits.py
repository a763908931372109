"""Do Linear layers below 16 bits train as torchao's own conversion does under torch.autocast, bit for bit?

Everything is emulated on the CPU. torchao cannot emulate training in nvfp4; for that format, tests/formats
compares the bits of its quantizer.
"""

import copy
import importlib.util

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.tensor import _ops
from torch.utils.data import DataLoader

import amp_plugin
from amp_plugin import AmpAccelerator, AmpKwargs, AmpPrecision, FabricAmpPrecision, OptionError
from amp_plugin.adapters.ignite import IgnitePrecision
from amp_plugin.formats import layers
from tests.adapters.lightning_models import QUIET, Linear, fit

needs_torchao = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao")]


def emulated(**options):
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, **options)


class Net(nn.Module):
    """Two layers whose shapes fit all 8-bit formats, a norm, and a head whose shape does not fit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()))


class Module(Linear):
    def __init__(self, **options):
        super().__init__(**options)
        self.net = Net()


def batches(count=4, rows=32):
    x = torch.randn(count, rows, 32, generator=torch.Generator().manual_seed(1))
    return [(batch, batch.sum(1, keepdim=True)) for batch in x]


def converted_by_torchao(net, precision, left_out=()):
    """Convert a copy of a model as torchao's documentation describes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    net = copy.deepcopy(net)
    if precision != "mxfp8":
        from dataclasses import replace

        names = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}
        config = replace(Float8LinearConfig.from_recipe_name(names[precision]), emulate=True)
        return convert_to_float8_training(
            net, config=config, module_filter_fn=lambda _, name: name in {"first", "second"} - {*left_out}
        )
    for name in ("first", "second"):
        layer = getattr(net, name)
        sides = layer.in_features, layer.out_features
        made = MXFP8Linear(*sides, kernel_preference=KernelPreference.EMULATED)
        made.load_state_dict(layer.state_dict())
        setattr(net, name, made)
    return net


def by_torchao(net, precision, clip=None, left_out=()):
    """Train with torchao's conversion under torch.autocast. Return losses and weights."""
    net = converted_by_torchao(net, precision, left_out)
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


def by_trainer(net, precision, clip):
    module = Module()
    module.net = net
    plugin = AmpPrecision(precision, emulate=True, one_pass=False)
    fit(module, plugin, steps=4, data=DataLoader(batches(), batch_size=None), gradient_clip_val=clip)
    return module.losses


def trained(net, region, backward, optimizer, clip_norm):
    losses = []
    for x, y in batches():
        with region():
            loss = nn.functional.mse_loss(net(x), y)
        backward(loss)
        clip_norm()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_fabric(net, precision, clip):
    plugin = FabricAmpPrecision(precision, emulate=True, one_pass=False)
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    _, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    clip_norm = lambda: clip and plugin.clip_grad_norm_(optimizer, clip)  # noqa: E731
    return trained(net, fabric.autocast, fabric.backward, optimizer, clip_norm)


def by_accelerate(net, precision, clip):
    handlers = [AmpKwargs(one_pass=False, emulate=True)]
    if precision == "fp8":
        from accelerate.utils import AORecipeKwargs

        handlers.append(AORecipeKwargs(config=emulated(), module_filter_func=lambda _, name: name in BOTH))
    accelerator = AmpAccelerator(mixed_precision=precision, cpu=True, kwargs_handlers=handlers)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    params = list(net.parameters())
    clip_norm = lambda: clip and accelerator.clip_grad_norm_(params, clip)  # noqa: E731
    losses = trained(net, accelerator.autocast, accelerator.backward, optimizer, clip_norm)
    assert not accelerator.last_step(optimizer).skipped
    assert accelerator.scaler is None
    return losses


def by_hand(net, precision, clip):
    amp_plugin.convert(net, precision, emulate=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    clip_norm = lambda: clip and nn.utils.clip_grad_norm_(net.parameters(), clip)  # noqa: E731
    region = lambda: amp_plugin.autocast("cpu", torch.bfloat16, cache_enabled=False)  # noqa: E731
    return trained(net, region, torch.Tensor.backward, optimizer, clip_norm)


BOTH = {"first", "second"}
KINDS = {"fp8": "Float8Linear", "fp8-rowwise": "Float8Linear", "mxfp8": "MXFP8Linear"}


@needs_torchao
@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("front", [by_trainer, by_fabric, by_accelerate, by_hand])
def test_losses_and_weights_are_torchaos(front, precision):
    clip = None if front is by_fabric else 0.5
    net = Net()
    expected = by_torchao(net, precision, clip)
    losses = front(net, precision, clip)
    torch.testing.assert_close((losses, [*net.parameters()]), expected, rtol=0, atol=0)
    kinds = {name: type(layer).__name__ for name, layer in net.named_children()}
    kind = KINDS[precision]
    assert kinds == {"first": kind, "norm": "LayerNorm", "second": kind, "head": "Linear"}


@needs_torchao
@pytest.mark.skipif(
    not hasattr(_ops, "scaled_mm_single_dim_strategy"),
    reason="torchao's MXFP8 training needs a newer torch",
)
def test_torchaos_quantize_of_mxfp8_trains_alike_without_a_bias_and_drops_one():
    """torchao 0.18's quantize_ drops the bias.

    Therefore we use torchao's module for the conversion, which keeps it.
    """
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    x = torch.randn(32, 32)
    for bias in (False, True):
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(32, 32, bias=bias))
        theirs = copy.deepcopy(ours)
        quantize_(theirs, config, filter_fn=lambda module, _: isinstance(module, nn.Linear))
        amp_plugin.convert(ours, "mxfp8", emulate=True)
        outputs = []
        for net in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(net(x))
            outputs[-1].square().mean().backward()
        difference = outputs[0] - outputs[1]
        expected = ours[0].bias.expand_as(difference) if bias else torch.zeros_like(difference)
        torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6 if bias else 0)
        if not bias:
            torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad, rtol=0, atol=0)


@needs_torchao
@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "mxfp8", "nvfp4"])
def test_an_input_in_bfloat16_is_rounded_as_the_same_numbers_in_float32(precision):
    """Under autocast, attention returns bfloat16.

    torchao's emulated mxfp8 refuses that input if the weights are float32.
    """
    torch.manual_seed(0)
    net = amp_plugin.convert(nn.Sequential(nn.Linear(128, 128, bias=False)), precision, emulate=True)
    x, outputs = torch.randn(128, 128).bfloat16(), []
    for given in (x, x.float()):
        leaf = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(net(leaf))
        outputs[-1].float().sum().backward()
        assert leaf.grad.dtype is given.dtype
    tolerance = 0 if precision == "mxfp8" else 2**-7
    torch.testing.assert_close(outputs[0].float(), outputs[1].float(), rtol=tolerance, atol=tolerance)


# -- which layers -------------------------------------------------------------------------------


def kinds_of(net):
    return {name: layers.format_of(module) for name, module in net.named_children() if name != "norm"}


@needs_torchao
def test_the_first_pattern_that_matches_decides(tmp_path):
    file = tmp_path / "formats.yaml"
    file.write_text("first: fp8-rowwise\n'*': bf16\n")
    net = amp_plugin.convert(Net(), "mxfp8", formats={"second": "bf16"}, emulate=True)
    assert kinds_of(net) == {"first": "mxfp8", "second": "", "head": ""}
    net = amp_plugin.convert(Net(), "mxfp8", formats=file, emulate=True)
    assert kinds_of(net) == {"first": "fp8-rowwise", "second": "", "head": ""}
    net = amp_plugin.convert(Net(), "bf16", formats={"second": "fp8"}, emulate=True)
    assert kinds_of(net) == {"first": "", "second": "fp8", "head": ""}
    net = amp_plugin.convert(Net(), "mxfp8", fp32_modules=["second"], emulate=True)
    assert kinds_of(net) == {"first": "mxfp8", "second": "", "head": ""}
    amp_plugin.convert(net, "mxfp8", fp32_modules=["second"], emulate=True)  # a second call converts nothing
    assert kinds_of(net) == {"first": "mxfp8", "second": "", "head": ""}


@needs_torchao
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"formats": {"head": "mxfp8"}},
            ValueError,
            "head is 1 x 32, but mxfp8 needs multiples of 32",
        ),
        ({"formats": {"haed": "bf16"}}, ValueError, "formats: 'haed' is not a name.*did you mean head"),
        ({"formats": {"head": "mx8"}}, OptionError, "the format 'mx8' is unknown.*did you mean 'mxfp8'"),
        ({"formats": "no.yaml"}, OptionError, r"formats='no.yaml'.*give a YAML file of lines such as 'head"),
        ({"formats": ["head"]}, OptionError, "a mapping of names or patterns"),
        (
            {"recipe": "rowwise"},
            OptionError,
            "recipe='rowwise' is not allowed; give a torchao MXFP8.*'mxfp8_rceil'",
        ),
        ({"fp32_modules": ["frist"]}, ValueError, "fp32_modules: 'frist' is not a name"),
    ],
)
def test_what_is_wrong_is_named(options, error, text):
    with pytest.raises(error, match=text):
        amp_plugin.convert(Net(), "mxfp8", emulate=True, **options)


@needs_torchao
@pytest.mark.parametrize("door", [AmpPrecision, FabricAmpPrecision, IgnitePrecision])
def test_formats_need_bf16_around_them(door):
    with pytest.raises(
        OptionError, match="formats=.* together with precision='bf16' or a precision below 16 bits"
    ):
        door("fp16", formats={"head": "fp8"})


@needs_torchao
def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"fp8: Linear has no Linear layer .* multiples of 16.*use 'bf16'"):
        fit(Linear(), AmpPrecision("fp8", emulate=True))
    with pytest.raises(ValueError, match="Linear is a Linear layer itself; put it into an nn.Sequential"):
        amp_plugin.convert(nn.Linear(32, 32), "mxfp8", emulate=True)


@needs_torchao
def test_rows_that_a_format_does_not_take_are_named():
    net = amp_plugin.convert(Net(), "mxfp8", emulate=True)
    with pytest.raises(ValueError, match=r"first gets 5 rows .*training in mxfp8 needs a multiple of 32"):
        net(torch.ones(5, 32))
    with torch.no_grad():
        assert net(torch.ones(5, 32)).shape == (5, 1)
    assert net.eval()(torch.ones(5, 32)).shape == (5, 1)


# -- devices, packages --------------------------------------------------------------------------


def wide():
    """Return a model with one layer that fits each format. It is never run."""
    net = Net()
    net.first = nn.Linear(128, 128)
    return net


def in_accelerate(precision):
    AmpAccelerator(mixed_precision=precision, cpu=True).prepare(wide())


def in_trainer(precision):
    module = Module()
    module.net = wide()
    fit(module, AmpPrecision(precision), data=DataLoader(batches(), batch_size=None))


@needs_torchao
@pytest.mark.parametrize(
    ("precision", "needs"),
    [("fp8", "8.9 on"), ("fp8-rowwise", "8.9 on"), ("mxfp8", "10.x"), ("nvfp4", "10.x")],
)
@pytest.mark.parametrize("run", [in_trainer, in_accelerate, lambda name: amp_plugin.convert(wide(), name)])
def test_a_device_that_lacks_a_format_names_what_it_needs(run, precision, needs):
    text = rf"this cpu has no arithmetic for {precision}, which needs an NVIDIA GPU .*{needs}.*emulate=True"
    with pytest.raises(ValueError, match=text):
        run(precision)


@needs_torchao
def test_recipes_have_names():
    config = AmpPrecision("fp8", recipe="rowwise").session.formats
    assert config.recipe == "rowwise"
    with pytest.raises(OptionError, match="recipe='rows' is not allowed; give .* 'tensorwise', 'rowwise'"):
        AmpPrecision("fp8", recipe="rows")
    with pytest.raises(TypeError, match="float8_config=...\\) was removed in 0.4: write recipe="):
        AmpPrecision("fp8", float8_config="rowwise")


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_without_torchao(cls, monkeypatch):
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="'fp8' needs torchao.*pip install .*or use 'bf16'"):
        cls("fp8")


# -- checkpoints, guard, copies, torch.compile -----------------------------------------------------


@needs_torchao
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_checkpoints_have_the_names_of_the_plain_model(precision, tmp_path):
    plugin = AmpPrecision(precision, emulate=True, fp32_modules=["net.second"])

    def run(module, steps, **options):
        data = DataLoader(batches(6), batch_size=None)
        return fit(module, plugin, steps, data, accumulate_grad_batches=2, **options)

    run(module := Module(), 2).save_checkpoint(tmp_path / "run.ckpt")
    assert layers.format_of(module.net.first) == precision
    assert type(module.net.second).__name__ == "Linear"
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Module().state_dict().keys()
    run(again := Module(), 3, ckpt_path=tmp_path / "run.ckpt")
    run(again, 4)  # a second fit must not convert the model again
    assert (plugin.scaler, plugin.precision) == (None, "bf16-mixed")


@needs_torchao
def test_the_guard_skips_a_step_with_a_nan():
    module = Module()
    data = batches()
    data[1][0][0, 0] = torch.nan
    plugin = AmpPrecision("mxfp8", emulate=True)
    with pytest.warns(UserWarning, match="skipped"):
        fit(module, plugin, steps=3, data=DataLoader(data, batch_size=None))
    assert plugin.skipped_steps == 1
    assert all(param.isfinite().all() for param in module.parameters())


@needs_torchao
def test_converted_models_copy_and_pickle(tmp_path):
    net = amp_plugin.convert(Net(), "mxfp8", emulate=True)
    x = batches()[0][0]
    torch.save(net, tmp_path / "net.pt")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        torch.testing.assert_close(other(x), net(x), rtol=0, atol=0)


@needs_torchao
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_compiled_by_the_eager_backend_the_numbers_stay(precision):
    nets = [amp_plugin.convert(Net(), precision, emulate=True) for _ in range(2)]
    x, y = batches()[0]
    losses = []
    for call in (nets[0], torch.compile(nets[1], backend="eager")):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(nn.functional.mse_loss(call(x), y))
        losses[-1].backward()
    grads = [[param.grad for param in net.parameters()] for net in nets]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


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


@needs_torchao
def test_accelerates_recipe_leaves_layers_of_other_formats_to_us():
    own = recipe(module_filter_func=lambda module, name: name != "head")
    kwargs = [own, AmpKwargs(formats={"second": "mxfp8"}, emulate=True)]
    accelerator = AmpAccelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=kwargs)
    assert kinds_of(accelerator.prepare(Net())) == {"first": "fp8", "second": "mxfp8", "head": ""}
