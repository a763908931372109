"""plugin.scaler exists from the start, and users can replace it."""

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from amp_plugin import AmpPrecision, FabricAmpPrecision, GradScaler
from tests.adapters.accelerate_pair import ours
from tests.adapters.lightning_models import QUIET, Linear, OneWeight, fit, regression

pytestmark = QUIET


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


def test_groups_that_are_known_later():
    scaler = GradScaler("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.core.place("cuda")
    assert scaler.core.optimizers == [optimizer]
    scaler.core.place("cpu", sharded_groups=("group",))
    assert scaler.core.optimizers == []
    with pytest.raises(RuntimeError, match="with process_groups or sharded_groups cannot be pickled"):
        pickle.dumps(scaler)
    assert (scaler.get_scale(), scaler.skipped_steps()) == (4.0, 1)


class AsksForTheScaler(OneWeight):
    """A module that uses the scaler in ``configure_optimizers``, as user code does."""

    def configure_optimizers(self):
        assert isinstance(self.trainer.precision_plugin.scaler, torch.amp.GradScaler)
        assert self.trainer.scaler is self.trainer.precision_plugin.scaler
        return super().configure_optimizers()


def test_it_stays_the_same_object_and_keeps_a_state_that_was_loaded():
    plugin = AmpPrecision("fp16", growth_interval=1)
    scaler = plugin.scaler
    plugin.load_state_dict(GradScaler("cpu", init_scale=64.0, growth_interval=1).state_dict())
    fit(AsksForTheScaler(), plugin, steps=2)
    assert plugin.scaler is scaler
    assert scaler.get_scale() == 256.0


# -- replaced -----------------------------------------------------------------------------------


class Wrapped:
    """A wrapper that counts calls, and has all methods of the scaler that it wraps."""

    def __init__(self, scaler):
        self._scaler, self.calls = scaler, []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._scaler, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            self.calls.append(name)
            return found(*args, **kwargs)

        return call


class SkipsEverySecond(Linear):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_wrapper_is_called_in_place_of_the_scaler():
    plugin, plain = (AmpPrecision("fp16", init_scale=512.0) for _ in range(2))
    plugin.scaler = wrapper = Wrapped(plugin.scaler)
    assert plugin.scaler is wrapper
    runs = []
    for each in (plugin, plain):
        module = SkipsEverySecond()
        fit(module, each, steps=6, data=regression(), gradient_clip_val=0.5)
        runs.append([*module.parameters()])
    assert wrapper.calls.count("scale") == 3
    assert wrapper.calls.count("step") == wrapper.calls.count("update") == 6
    torch.testing.assert_close(
        *runs, rtol=1e-6, atol=1e-7
    )  # the scaler's own step includes the clip, the wrapper's step does not


def test_torchs_scaler_gives_ours_its_options_and_state(fused):
    mine, theirs = (
        torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_factor=4.0, growth_interval=3)
        for _ in range(2)
    )
    plugin = AmpPrecision("fp16", scaler=mine)
    assert type(plugin.scaler) is GradScaler
    clip = {} if fused else {"gradient_clip_val": 0.5}  # the stock plugin cannot clip with a fused optimizer
    runs = []
    for precision in (plugin, MixedPrecision("16-mixed", "cpu", scaler=theirs)):
        module = Linear(fused=fused)
        fit(module, precision, steps=8, data=regression(), **clip)
        runs.append([*module.parameters()])
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)  # our norm differs from torch's in the last bits
    assert theirs.get_scale() != 2.0**20
    ours = plugin.scaler.state_dict()
    assert {key: ours[key] for key in theirs.state_dict()} == theirs.state_dict()
    assert mine.get_scale() == 2.0**20


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        (GradScaler("cpu", init_scale=8.0, growth_interval=1), 32.0),
        (torch.amp.GradScaler("cpu", enabled=False), None),
        (None, None),
    ],
    ids=["ours", "torch's, disabled", "none"],
)
def test_another_scaler_or_none(given, scale):
    plugin, module = AmpPrecision("fp16"), OneWeight()
    plugin.scaler = given
    fit(module, plugin, steps=2)
    assert module.w.item() == 1.0 - 2 * 3.0
    assert plugin.scaler is (given if scale else None)
    assert scale is None or given.get_scale() == scale


class OwnStep(torch.amp.GradScaler):
    """A scaler that overrides ``step``, as programs do with torch's."""

    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("make", [lambda: AmpPrecision("fp16"), lambda: FabricAmpPrecision("fp16"), ours])
@pytest.mark.parametrize("given", [1024.0, OwnStep("cpu")], ids=["number", "subclass of torch's"])
def test_what_is_no_scaler_of_ours_is_refused(make, given):
    plugin = make()
    before = plugin.scaler
    with pytest.raises(TypeError, match=r"\.scaler = .*it has no .*or None for no loss scale"):
        plugin.scaler = given
    assert plugin.scaler is before


# -- Fabric -------------------------------------------------------------------------------------


def test_fabric_hands_stand_ins_on_without_a_scaler():
    plugin, optimizer = FabricAmpPrecision("bf16"), Mock(spec=["step", "zero_grad"])
    plugin.optimizer_step(optimizer, named="by name")
    optimizer.step.assert_called_once_with(named="by name")
