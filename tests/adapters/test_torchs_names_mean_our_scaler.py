"""Under ``amp-plugin run`` torch's names of the scaler mean a class of ours, which behaves as torch's class."""

import abc
import copy
import inspect
import pickle

import pytest
import torch

import amp_plugin
from amp_plugin.adapters.takeover import Takeover

STOCK = torch.amp.GradScaler


class Early(torch.amp.GradScaler):
    """A class that a program defines before torch's names are replaced."""


KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@pytest.fixture(autouse=True)
def _taken():
    with Takeover("a test"):
        yield


def stepped(scaler, value=1.0):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist()


def made_by(name):
    owner = torch
    for part in name.split("."):
        owner = getattr(owner, part)
    device = [] if ".amp" in name.removeprefix("amp") else ["cpu"]
    return owner, owner(*device)


@pytest.mark.filterwarnings("ignore:`torch.c.*GradScaler:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        *("GradScaler", "amp.GradScaler", "amp.grad_scaler.GradScaler"),
        *("cuda.amp.GradScaler", "cuda.amp.grad_scaler.GradScaler", "cpu.amp.GradScaler"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_scaler_is_of_the_class_by_which_it_was_made(name):
    kind, scaler = made_by(name)
    assert type(scaler) is kind
    assert scaler.__class__ == kind
    assert isinstance(scaler, amp_plugin.GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scaler, STOCK)
    assert issubclass(kind, torch.amp.GradScaler)
    theirs = kind.__mro__[1] if name.startswith("c") else STOCK
    assert (kind.__module__, kind.__qualname__) == (theirs.__module__, "GradScaler")
    assert inspect.signature(kind) == inspect.signature(theirs)


def test_names_agree_as_in_torch():
    assert torch.amp.GradScaler is torch.GradScaler is torch.amp.grad_scaler.GradScaler
    assert torch.cuda.amp.GradScaler is torch.cuda.amp.grad_scaler.GradScaler
    assert issubclass(torch.cuda.amp.GradScaler, torch.amp.GradScaler)
    assert not isinstance(object(), torch.amp.GradScaler)


def test_classes_of_torch_are_related_to_torchs_names_as_in_torch():
    class Late(torch.amp.GradScaler):
        pass

    for kind in (STOCK, Early, Late, type(Early("cpu"))):
        assert issubclass(kind, torch.amp.GradScaler)
        assert not issubclass(kind, torch.cuda.amp.GradScaler)
    for kind in (STOCK, Early, torch.amp.GradScaler):
        assert not issubclass(kind, Late)
    assert isinstance(Early("cpu"), torch.amp.GradScaler)
    assert not isinstance(torch.amp.GradScaler("cpu"), (Late, Early))


def test_a_subclass_is_the_programs_class():
    class Counting(torch.amp.GradScaler):
        steps = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.made = True

        def step(self, optimizer, *args, **kwargs):
            self.steps += 1
            return torch.amp.GradScaler.step(self, optimizer, *args, **kwargs)  # by the name of the base

    class More(Counting, abc.ABC):
        pass

    for kind in (Counting, More):
        scaler = kind("cpu", init_scale=4.0)
        assert type(scaler) is kind
        assert isinstance(scaler, amp_plugin.GradScaler)
        assert stepped(scaler) == [0.0, 0.0]
        assert (scaler.steps, scaler.made) == (1, True)
        assert type(copy.deepcopy(scaler)) is kind


def test_a_base_that_is_called_by_its_name():
    class Old(torch.amp.GradScaler):
        def __init__(self):
            torch.amp.GradScaler.__init__(self, "cpu", init_scale=8.0)

    assert Old().get_scale() == 8.0
    assert stepped(Old()) == [0.0, 0.0]


def test_a_class_that_overrides_private_methods_is_torchs(capfd):
    class Inner(torch.amp.GradScaler):
        def __init__(self):
            torch.amp.GradScaler.__init__(self, "cpu", init_scale=8.0)

        def _unscale_grads_(self, *args):
            return torch.amp.GradScaler._unscale_grads_(self, *args)

    class OnCpu(torch.cpu.amp.GradScaler):
        def _unscale_grads_(self, *args):
            return super()._unscale_grads_(*args)

    class Mixin:
        def __init_subclass__(cls, *, note, **options):
            super().__init_subclass__(**options)
            cls.note = note

        def _maybe_opt_step(self, *args, **kwargs):
            return super()._maybe_opt_step(*args, **kwargs)

    class Mixed(Mixin, torch.amp.GradScaler, note="mixed"):
        pass

    class Abstract(Mixin, abc.ABC, torch.amp.GradScaler, note="abstract"):
        pass

    with pytest.warns(FutureWarning):
        scalers = [
            Inner(),
            Mixed("cpu", init_scale=8.0),
            Abstract("cpu", init_scale=8.0),
            OnCpu(init_scale=8.0),
        ]
    assert (Mixed.note, Abstract.note) == ("mixed", "abstract")
    said = capfd.readouterr().err
    for scaler in scalers:
        assert not isinstance(scaler, amp_plugin.GradScaler)
        assert isinstance(scaler, torch.amp.GradScaler)
        assert isinstance(scaler, type(scaler))
        assert stepped(scaler) == [0.0, 0.0]
        assert f"{type(scaler).__name__} overrides private methods" in said


@pytest.mark.parametrize(
    "name", ["unscale_", "_unscale_grads_", "step", "update", "_maybe_opt_step", "scale"]
)
@pytest.mark.parametrize("kind", ["torch.amp", "subclass"])
def test_a_method_that_is_assigned_to_the_class_is_called(name, kind, monkeypatch):
    calls, original = [], getattr(torch.amp.GradScaler, name)

    def assigned(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, name, assigned)
    cls = torch.amp.GradScaler if kind == "torch.amp" else type("Mine", (torch.amp.GradScaler,), {})
    assert stepped(cls("cpu", init_scale=4.0)) == [0.0, 0.0]
    assert calls == [name]


def test_a_state_has_torchs_keys():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stepped(scaler)
    stepped(scaler, float("inf"))
    assert scaler.state_dict().keys() == KEYS
    assert scaler.skipped_steps() == 1
    assert torch.amp.GradScaler("cpu", enabled=False).state_dict() == {}
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.get_scale() == 2.0
    fresh.load_state_dict(amp_plugin.GradScaler("cpu", init_scale=32.0).state_dict())
    assert fresh.get_scale() == 32.0


def test_a_state_that_holds_more_than_torchs_keeps_it(monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_HYSTERESIS", "3")
    state = torch.amp.GradScaler("cpu").state_dict()
    assert state["amp_plugin"]["hysteresis_tracker"] == 3


def test_pickles_name_torchs_class_and_load_as_ours():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.note = "the program's"
    stored = pickle.dumps(scaler)
    assert b"amp_plugin" not in stored
    loaded = pickle.loads(stored)
    assert type(loaded) is torch.amp.GradScaler
    assert isinstance(loaded, amp_plugin.GradScaler)
    assert (loaded.get_scale(), loaded.note) == (4.0, "the program's")
    assert type(copy.copy(scaler)) is type(copy.deepcopy(scaler)) is torch.amp.GradScaler


def test_a_copy_is_pickled_as_its_original():
    for kind in (torch.amp.GradScaler, Early):
        stored = pickle.dumps(copy.deepcopy(kind("cpu", init_scale=4.0)))
        assert b"amp_plugin" not in stored
        loaded = pickle.loads(stored)
        assert isinstance(loaded, amp_plugin.GradScaler)
        assert (type(loaded).__name__, loaded.get_scale()) == (kind.__name__, 4.0)


def test_a_scaler_that_is_made_by_an_early_import_is_pickled():
    loaded = pickle.loads(pickle.dumps(STOCK("cpu", init_scale=4.0)))
    assert type(loaded) is amp_plugin.GradScaler
    assert loaded.get_scale() == 4.0


@pytest.mark.parametrize("waiting", [torch.float32, torch.float64])
def test_a_skip_is_seen_although_another_optimizer_has_yet_to_step(waiting):
    """A program that looks for skips in get_scale() sees them, and each gradient is divided by its own scale."""
    first, second = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, waiting))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for optimizer, weight in zip(optimizers, (first, second), strict=True):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale((first * float("inf") + second).sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert second.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizers[1])
    assert second.tolist() == [-1.0, -1.0]
