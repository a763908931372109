"""plugin.scaler: there from the start, and replaced by scalers that users bring."""

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision

from amp_plugin import AmpMonitor, AmpPrecision, FabricAmpPrecision, GradScaler
from amp_plugin.scaling.ranks import Groups
from tests.adapters.lightning_models import QUIET, Linear, OneWeight, fit, regression

pytestmark = QUIET
HALVES = {
    "scheduler": lambda optimizer: {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
}


# -- from construction on -----------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_there_is_a_scaler_from_construction_on(cls):
    plugin = cls("fp16", init_scale=512.0)
    assert isinstance(plugin.scaler, torch.amp.GradScaler)
    assert plugin.scaler.get_scale() == 512.0
    assert plugin.scaler is plugin.scaler
    for twin in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert twin.scaler.get_scale() == 512.0
        assert twin.scaler is not plugin.scaler


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_there_is_none_where_nothing_is_scaled(cls, precision):
    plugin = cls(precision)
    assert plugin.scaler is None
    plugin.scaler = None
    with pytest.raises(TypeError, match=rf"no loss is scaled in {precision}; use {cls.__name__}\('fp16'\)"):
        plugin.scaler = torch.amp.GradScaler("cpu")


class AsksForTheScaler(OneWeight):
    """Asserts what user code asserts when it makes its optimizers."""

    def configure_optimizers(self):
        assert isinstance(self.trainer.precision_plugin.scaler, torch.amp.GradScaler)
        assert self.trainer.scaler is self.trainer.precision_plugin.scaler
        return super().configure_optimizers()


def test_it_stays_the_same_object():
    plugin = AmpPrecision("fp16", init_scale=512.0, growth_interval=1)
    scaler = plugin.scaler
    fit(AsksForTheScaler(), plugin, steps=2)
    assert plugin.scaler is scaler
    assert scaler.get_scale() == 2048.0


def test_a_state_loaded_before_training_is_used():
    plugin = AmpPrecision("fp16")
    plugin.load_state_dict(GradScaler("cpu", init_scale=64.0).state_dict())
    assert plugin.scaler.get_scale() == 64.0
    fit(OneWeight(), plugin)
    assert plugin.scaler.get_scale() == 64.0


def test_groups_that_are_known_later():
    scaler = GradScaler("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.place("cuda")
    assert scaler.optimizers == [optimizer]
    scaler.place("cpu", sharded_groups=("group",))
    assert scaler.optimizers == []
    assert scaler._groups == Groups(sharded=("group",))
    assert (scaler.get_scale(), scaler.skipped_steps()) == (4.0, 1)


# -- replaced -----------------------------------------------------------------------------------


def weights_after(plugin, module=None, **options):
    module = Linear() if module is None else module
    trainer = fit(module, plugin, steps=6, data=regression(), gradient_clip_val=0.5, **options)
    return trainer, [param.detach().clone() for param in module.parameters()]


class SkipsEverySecond(Linear):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("make", [None, lambda: torch.amp.GradScaler("cpu", init_scale=512.0)])
def test_a_mock_that_wraps_a_scaler_sees_the_stock_calls(make):
    plugin, plain = (AmpPrecision("fp16", init_scale=512.0) for _ in range(2))
    for precision in (plugin, plain):
        precision.scaler = make() if make else precision.scaler
    plugin.scaler = Mock(wraps=plugin.scaler)
    _, seen = weights_after(plugin, SkipsEverySecond())
    _, expected = weights_after(plain, SkipsEverySecond())
    for call in (plugin.scaler.scale, plugin.scaler.unscale_, plugin.scaler.step, plugin.scaler.update):
        assert call.call_count == 3
    exact = (
        {"rtol": 0, "atol": 0} if make else {"rtol": 1e-5, "atol": 1e-6}
    )  # our own clipping has another norm
    torch.testing.assert_close(seen, expected, **exact)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_scaler_trains_as_under_the_stock_plugin(fused):
    mine, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3) for _ in range(2))
    plugin = AmpPrecision("fp16")
    plugin.scaler = mine
    clip = {} if fused else {"gradient_clip_val": 0.5}  # stock clips no fused optimizer
    runs = []
    for precision in (plugin, MixedPrecision("16-mixed", "cpu", scaler=theirs)):
        module = Linear(fused=fused)
        trainer = fit(module, precision, steps=8, data=regression(), **clip)
        runs.append([*module.parameters()])
        assert trainer.precision_plugin.scaler.get_scale() == mine.get_scale()
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    assert mine.state_dict() == theirs.state_dict()
    assert plugin.scaler is mine


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_a_replaced_scaler_does_is_told(fused, clip, tmp_path):
    plugin = AmpPrecision("fp16")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module = OneWeight(overflow_at=(1,), lr=0.1, fused=fused, **HALVES)
    monitor = AmpMonitor()
    reports = []
    plugin.observers.append(lambda optimizer, result: reports.append(result.overflow_report().summary()))
    trainer = fit(module, plugin, steps=3, callbacks=[monitor], gradient_clip_val=clip)
    assert (plugin.skipped_steps, plugin.optimizer_steps, monitor.skipped_steps) == (1, 2, 1)
    assert module.lrs == pytest.approx([0.05, 0.05, 0.025])
    kind = "nan" if clip else "inf"  # torch's clipping multiplies by 1 / inf
    assert reports == ["no overflow", f"{kind} in 1 gradient: w", "no overflow"]
    result = plugin.last_step(trainer.optimizers[0])
    assert (result.skipped, result.scale_before, result.scale_after) == (False, 4.0, 4.0)
    assert trainer.logged_metrics["loss_scale"] == 4.0
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["MixedPrecision"]
    assert saved["scale"] == 4.0
    again = AmpPrecision("fp16")
    fit(OneWeight(), again, steps=4, ckpt_path=tmp_path / "run.ckpt")
    assert (again.scaler.get_scale(), again.skipped_steps) == (4.0, 0)


def test_another_scaler_of_ours():
    plugin = AmpPrecision("fp16")
    plugin.scaler = mine = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    fit(OneWeight(), plugin, steps=2)
    assert plugin.scaler is mine
    assert mine.get_scale() == 32.0


def test_none_scales_no_loss():
    plugin = AmpPrecision("fp16")
    plugin.scaler = None
    module = OneWeight()
    fit(module, plugin, steps=1)
    assert module.w.item() == -2.0
    assert plugin.scaler is None


def test_a_penalty_beside_a_replaced_scaler():
    plugin = AmpPrecision("fp16")
    plugin.scaler = torch.amp.GradScaler("cpu")
    inputs = torch.ones(3, requires_grad=True)
    assert plugin.grad(inputs.square().sum(), inputs)[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_what_is_no_scaler_is_refused(cls):
    plugin = cls("fp16")
    with pytest.raises(
        TypeError, match=r"scaler = 1024\.0: this is no GradScaler, it has no scale, .*or None"
    ):
        plugin.scaler = 1024.0


# -- Fabric -------------------------------------------------------------------------------------


def test_fabric_hands_stand_ins_on():
    plugin = FabricAmpPrecision("fp16", device="cpu")
    plugin.scaler = Mock()
    plugin.scaler.scale = Mock(side_effect=lambda loss: loss)
    loss, optimizer = Mock(), Mock(spec=["step", "zero_grad"])
    plugin.backward(loss, Mock(), "by position", named="by name")
    plugin.scaler.scale.assert_called_once_with(loss)
    loss.backward.assert_called_once_with("by position", named="by name")
    plugin.optimizer_step(optimizer, named="by name")
    plugin.scaler.step.assert_called_once_with(optimizer, named="by name")
    plugin.scaler.update.assert_called_once_with()


def test_fabric_hands_stand_ins_on_without_a_scaler():
    plugin, optimizer = FabricAmpPrecision("bf16", device="cpu"), Mock(spec=["step", "zero_grad"])
    plugin.optimizer_step(optimizer, named="by name")
    optimizer.step.assert_called_once_with(named="by name")


@pytest.mark.parametrize(
    "replace", [lambda scaler: Mock(wraps=scaler), lambda _: torch.amp.GradScaler("cpu")]
)
def test_fabric_trains_with_a_replaced_scaler(replace):
    finals, counts = [], []
    for change in (replace, None):
        plugin = FabricAmpPrecision("fp16")
        fabric = Fabric(plugins=[plugin], accelerator="cpu")
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        if change:
            plugin.scaler = change(plugin.scaler)
        for batch in torch.ones(4, 2, 4):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        finals.append([*net.parameters()])
        counts.append((plugin.optimizer_steps, plugin.skipped_steps, plugin.scaler.get_scale()))
    torch.testing.assert_close(*finals, rtol=0, atol=0)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "plugin_of",
    [
        lambda scaler: FabricMixedPrecision("16-mixed", "cpu", scaler=scaler),
        lambda scaler: FabricAmpPrecision("fp16", scaler=scaler),
    ],
    ids=["stock", "ours"],
)
def test_gradients_after_a_dropped_batch_are_not_taken_for_unscaled_ones(plugin_of):
    plugin = plugin_of(torch.amp.GradScaler("cpu", init_scale=1024.0))
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad()  # no step: the batch is dropped
    fabric.backward(model(torch.ones(2, 4)).square().mean())
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
