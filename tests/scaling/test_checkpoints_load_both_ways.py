"""Invariant 6: checkpoints of torch.amp, Lightning and Accelerate load into ours, and ours into theirs."""

import copy
import math
import pickle

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling.words import Words


def used(cls, weights, **options):
    scaler = cls("cpu", init_scale=2.0**10, growth_interval=3, **options)
    weights().train(scaler, 1.0, math.inf, 1.0, 1.0)
    return scaler


def test_torchs_keys_and_numbers(weights):
    ours, theirs = used(GradScaler, weights).state_dict(), used(torch.amp.GradScaler, weights).state_dict()
    assert {key: ours[key] for key in theirs} == theirs
    assert ours["amp_plugin"] == {"hysteresis_tracker": 1, "skipped_steps": 1, "losses": {}}


TORCHS_KEYS = torch.amp.GradScaler("cpu").state_dict().keys()


def test_a_state_has_torchs_keys_only_until_it_holds_more(weights):
    one = weights()
    for options in ({}, {"dynamic": False}, {"growth_interval": 2}, {"min_scale": 1.0, "on_spike": None}):
        scaler = GradScaler("cpu", **options)
        assert scaler.state_dict().keys() == TORCHS_KEYS
        weights().train(scaler, 1.0)
        assert scaler.state_dict().keys() == TORCHS_KEYS
    for options in ({"hysteresis": 2}, {"losses": ["a"]}, {"on_spike": "skip"}):
        assert GradScaler("cpu", **options).state_dict().keys() == {*TORCHS_KEYS, "amp_plugin"}
    one.train(scaler, math.inf)
    assert scaler.state_dict()["amp_plugin"]["skipped_steps"] == 1
    assert GradScaler("cpu", enabled=False).state_dict() == {}


OF_0_3 = {
    "scale": 4.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({"hysteresis_tracker": 1, "skipped_steps": 0, "losses": {}}, None),
        ({"hysteresis_tracker": 1, "skipped_steps": 3, "losses": {}}, 3),
    ],
)
def test_a_state_of_release_0_3_loads(weights, ours, expected):
    """Release 0.3 always wrote the key ``amp_plugin``. It reads a state without that key as torch's."""
    scaler = used(GradScaler, weights)
    scaler.load_state_dict({**OF_0_3, "amp_plugin": ours})
    assert (scaler.get_scale(), scaler.skipped_steps()) == (4.0, expected or 0)
    kept = {} if expected is None else {"amp_plugin": ours}
    assert scaler.state_dict() == {**OF_0_3, **kept}


@pytest.mark.parametrize(
    ("source", "target"), [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)]
)
@pytest.mark.parametrize("started", [False, True])
def test_both_ways(source, target, started, weights):
    state = used(source, weights).state_dict()
    fresh = used(target, weights) if started else target("cpu")
    fresh.load_state_dict(state)
    weights().train(fresh, 1.0)
    assert fresh.get_scale() == 2.0**10, "two good steps before, one after: the scale grew"


def test_our_own_state_comes_back(weights):
    options = {"hysteresis": 2, "hysteresis_mode": "megatron", "losses": ("penalty",)}
    first = used(GradScaler, weights, **options)
    first.scale(torch.ones(()), name="penalty")
    first.update(2.0**5)
    state = first.state_dict()
    assert state["amp_plugin"]["hysteresis_tracker"] == 1
    second = GradScaler("cpu", **options)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.get_scale("penalty") == 2.0**5
    assert second.skipped_steps() == 1


def test_it_survives_weights_only_loading(weights, tmp_path):
    state = used(GradScaler, weights).state_dict()
    torch.save(state, tmp_path / "scaler.pt")
    assert torch.load(tmp_path / "scaler.pt", weights_only=True) == state


def test_empty_states_raise_and_foreign_ones_warn_and_change_nothing(weights):
    scaler = used(GradScaler, weights)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match=r"state dict is empty, .* Do not load it"):
        scaler.load_state_dict({})
    apex = {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}
    with pytest.warns(UserWarning, match="holds 'loss_scaler0', which is not .*Set one with update"):
        scaler.load_state_dict(apex)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_a_state_that_is_not_whole_is_refused(scaler_class):
    scaler = scaler_class("cpu", init_scale=8.0)
    state = {"scale": 4.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 0}
    with pytest.raises(KeyError, match="growth_factor"):
        scaler.load_state_dict(state)
    assert scaler.get_growth_interval() == 2000


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_speaks_the_words_of_its_entry_point(copied, weights):
    scaler, one = GradScaler("cpu"), weights()
    scaler.core.shared.speak(Words(backward="door.backward(loss)"))
    one.loss().backward()
    with pytest.raises(AssertionError, match=r"Call door.backward\(loss\) earlier"):
        copied(scaler).step(one.optimizer)
