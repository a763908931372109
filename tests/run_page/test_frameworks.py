"""The page under each framework: its steps, losses and skips."""

import math
import re

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn

import amp_plugin
from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs, install, uninstall
from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import reset
from tests.adapters.lightning_models import QUIET, fit
from tests.adapters.tiny_bert import bert, texts
from tests.run_page.test_report import data_of, text_of

pytestmark = [
    *QUIET,
    pytest.mark.native,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """With some initial scales, the first step in fp16 overflows."""
    torch.manual_seed(1)


def mean_of_chosen(out: torch.Tensor, is_bad: bool) -> torch.Tensor:
    chosen = out.float()[out > (math.inf if is_bad else -math.inf)]
    return (chosen * out.sum()).mean()


class OneBadStep(LightningModule):
    def __init__(self, bad=4, lr=0.01):
        super().__init__()
        self.lr = lr
        self.net, self.bad = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)), bad

    def training_step(self, batch, batch_idx):
        return mean_of_chosen(self.net(batch.reshape(1, 1)), batch_idx == self.bad)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_lightning(tmp_path, precision):
    monitor = AmpMonitor(report=tmp_path / "run.html")
    fit(OneBadStep(), AmpPrecision(precision), steps=8, callbacks=[monitor], gradient_clip_val=0.01)
    data = data_of(tmp_path / "run.html")
    assert data["steps"] == 8
    assert [loss is None for loss in data["curves"]["loss"]] == [i == 4 for i in range(8)]
    assert data["curves"]["before"][0] > data["curves"]["after"][0] == pytest.approx(0.01, rel=1e-3)
    assert "loss or gradients not finite step 5" in text_of(tmp_path / "run.html")
    assert "finished" in text_of(tmp_path / "run.html")
    assert "net.0" in data["cells"]["modules"]


def test_lightning_accumulates_losses_of_a_window(tmp_path):
    monitor = AmpMonitor(report=tmp_path / "run.html")
    module = OneBadStep(bad=-1, lr=0.0)
    fit(module, AmpPrecision("fp32"), steps=3, callbacks=[monitor], accumulate_grad_batches=4)
    losses = data_of(tmp_path / "run.html")["curves"]["loss"]
    with torch.no_grad():
        now = mean_of_chosen(module.net(torch.full((1, 1), 3.0)), False)
    assert losses[-1] == pytest.approx(float(now), rel=1e-4)


def test_a_run_that_only_skips_leaves_its_page(tmp_path):
    monitor = AmpMonitor(report=tmp_path / "run.html", max_skips_in_a_row=4)

    class AlwaysBad(OneBadStep):
        def training_step(self, batch, batch_idx):
            return mean_of_chosen(self.net(batch.reshape(1, 1) * math.nan), False)

    with pytest.raises(RuntimeError, match=r"4 steps of \w+ in a row"):
        fit(AlwaysBad(), AmpPrecision("bf16"), steps=8, callbacks=[monitor])
    text = text_of(tmp_path / "run.html")
    assert "ended by RuntimeError: 4 steps of SGD in a row were skipped" in text
    assert "4 of 4 steps: steps 1 to 4" in text


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fabric(tmp_path, precision):
    plugin = FabricAmpPrecision(precision)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with amp_plugin.report(plugin, net, tmp_path / "run.html") as page:
        for step in range(8):
            fabric.backward(mean_of_chosen(model(torch.ones(1, 1)), step >= 4))
            optimizer.step()
            optimizer.zero_grad()
    assert page.history.steps == 8
    assert "loss or gradients not finite steps 5 to 8" in text_of(page.path)
    assert precision in text_of(page.path)


@pytest.fixture
def accelerate():
    reset()
    yield
    uninstall()
    reset()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_accelerate(tmp_path, precision, accelerate):
    options = AmpKwargs(report=tmp_path / "run.html")
    accelerator = AmpAccelerator(
        mixed_precision=precision, cpu=True, kwargs_handlers=[options], gradient_accumulation_steps=2
    )
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))

    for step in range(16):
        with accelerator.accumulate(net):
            accelerator.backward(mean_of_chosen(net(torch.ones(1, 1)), step == 9))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    data = data_of(tmp_path / "run.html")
    assert data["steps"] == 8
    assert [loss is None for loss in data["curves"]["loss"]] == [i == 4 for i in range(8)]
    assert "loss or gradients not finite step 5" in text_of(tmp_path / "run.html")


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


def two_models():
    models = Generator(4, 4), Critic(4, 1)
    return models, [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]


def accelerate_pair(path):
    accelerator = AmpAccelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[AmpKwargs(report=path)])
    models, optimizers = two_models()
    prepared = accelerator.prepare(*models, *optimizers)
    yield prepared[:2], prepared[2:], accelerator.backward
    accelerator.end_training()


def fabric_pair(path):
    plugin = FabricAmpPrecision("bf16")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    models, optimizers = two_models()
    made = [fabric.setup(*pair) for pair in zip(models, optimizers, strict=True)]
    with amp_plugin.report(plugin, models, path):
        yield *zip(*made, strict=True), fabric.backward


@pytest.mark.parametrize("pair", [accelerate_pair, fabric_pair])
def test_two_models_are_both_followed(pair, tmp_path, accelerate):
    for models, optimizers, backward in pair(tmp_path / "run.html"):
        generator, critic = models
        for number in range(6):
            loss = critic(generator(torch.ones(2, 4))).float().mean()
            backward(loss * math.inf if number == 3 else loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    text, data = text_of(tmp_path / "run.html"), data_of(tmp_path / "run.html")
    assert data["steps"] == 12
    assert "ran in compiled code" not in text
    for name in ("Generator", "Critic"):
        assert re.search(rf"{name}\b.* fp32 .*bf16", text)
        assert any(name in module for module in data["cells"]["modules"])


def test_transformers(tmp_path, accelerate, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("AMP_PLUGIN_REPORT", str(tmp_path / "run.html"))
    install()
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, max_steps=6, **quiet)
    model = bert(layers=1, dropout=0.1)
    model.classifier.register_forward_hook(
        lambda module, _, out: out * math.nan if int(trainer.state.global_step) == 3 else out
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=texts(48))
    trainer.train()
    trainer.accelerator.end_training()
    data = data_of(tmp_path / "run.html")
    assert data["steps"] == 6
    assert data["curves"]["loss"][0] > 0
    assert [loss is None for loss in data["curves"]["loss"]] == [i == 3 for i in range(6)]
    assert "classifier.bias" in text_of(tmp_path / "run.html")
