"""Errors about removed names say what to use instead."""

import pickle

import pytest

import amp_plugin
from amp_plugin import removed
from amp_plugin.adapters.lightning import AmpPrecision


@pytest.mark.parametrize("name", [name for name in removed.REMOVED if name.startswith("amp_plugin.")])
def test_a_name_of_the_package(name):
    with pytest.raises(AttributeError, match=f"{name} was removed in 0.4: "):
        getattr(amp_plugin, name.removeprefix("amp_plugin."))


@pytest.mark.parametrize("name", ["GradScaler.recorded", "AmpPrecision.run_again"])
def test_an_attribute_of_a_class_and_of_those_that_inherit_from_it(name):
    owner, _, attribute = name.rpartition(".")
    made = {"GradScaler": lambda kind: kind("cpu"), "AmpPrecision": lambda kind: kind("bf16")}[owner]
    base = {"GradScaler": amp_plugin.GradScaler, "AmpPrecision": AmpPrecision}[owner]
    for kind in (base, type("Own", (base,), {})):
        with pytest.raises(AttributeError, match=f"{name} was removed in 0.4: .*amp-plugin diagnose"):
            getattr(made(kind), attribute)


def test_other_attributes_are_missing_as_always():
    scaler = amp_plugin.GradScaler("cpu")
    assert not hasattr(scaler, "nothing_like_it")
    with pytest.raises(AttributeError, match="'GradScaler' object has no attribute 'nothing_like_it'"):
        scaler.nothing_like_it  # noqa: B018
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == scaler.get_scale()


def test_an_error_within_a_property_is_still_its_own():
    class Own(amp_plugin.GradScaler):
        @property
        def broken(self):
            return self.inner.value

    with pytest.raises(AttributeError, match="no attribute 'inner'"):
        Own("cpu").broken  # noqa: B018


def test_keywords(monkeypatch):
    monkeypatch.setitem(removed.REMOVED, "gone=", "give kept=")

    @removed.without_removed_keywords
    def function(*, kept=0):
        return kept

    assert function(kept=3) == 3
    with pytest.raises(TypeError, match=r"function\(gone=...\) was removed in 0.4: give kept="):
        function(gone=1)
    with pytest.raises(TypeError, match=r"GradScaler\(gone=...\) was removed in 0.4: give kept="):
        amp_plugin.GradScaler("cpu", gone=1)
    with pytest.raises(TypeError, match="unknown option 'goen'"):
        amp_plugin.GradScaler("cpu", goen=1)


def test_each_row_is_gone():
    for place in removed.REMOVED:
        owner, _, attribute = place.rpartition(".")
        if owner in dir(amp_plugin):
            assert not hasattr(getattr(amp_plugin, owner), attribute), place
