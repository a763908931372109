"""Options that a program leaves unset come from the environment and its file, in Lightning and in Accelerate."""

import pytest
import torch

pytest.importorskip("lightning")

from amp_plugin import AmpPrecision, FabricAmpPrecision, GradScaler


@pytest.fixture(params=[AmpPrecision, FabricAmpPrecision], ids=["trainer", "fabric"])
def plugin(request):
    return request.param


def test_the_environment_sets_what_the_program_leaves_open(plugin, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "1024")
    monkeypatch.setenv("AMP_PLUGIN_FP32_MODULES", "LayerNorm, head.*")
    assert plugin("fp16").scaler.get_scale() == 1024.0
    assert plugin("fp16").settings.fp32_modules == ("LayerNorm", "head.*")
    assert plugin("fp16", init_scale=8.0).scaler.get_scale() == 8.0
    monkeypatch.setenv("AMP_PLUGIN_DYNAMIC", "maybe")
    with pytest.raises(ValueError, match=r"dynamic='maybe' .* \(dynamic comes from AMP_PLUGIN_DYNAMIC\)"):
        plugin("fp16")


def test_an_option_of_accelerate_alone_is_told(plugin, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_FP32_OUTPUTS", "1")
    with pytest.warns(
        UserWarning, match="fp32_outputs from AMP_PLUGIN_FP32_OUTPUTS has no effect in Lightning"
    ):
        plugin("fp16")


@pytest.mark.parametrize("scaler", [GradScaler("cpu"), torch.amp.GradScaler("cpu")], ids=["ours", "torchs"])
def test_options_beside_a_scaler_are_refused(plugin, scaler, monkeypatch):
    text = r"give scaler=amp_plugin.GradScaler\(init_scale=8\), or leave scaler= out"
    with pytest.raises(TypeError, match=text):
        plugin("fp16", scaler=scaler, init_scale=8)
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "8")
    assert plugin("fp16", scaler=scaler).scaler.get_scale() == 65536.0


def test_an_option_is_not_blamed_for_one_whose_name_is_longer(plugin, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_HYSTERESIS", "2")
    with pytest.raises((TypeError, ValueError), match="hysteresis_mode") as refused:
        plugin("fp16", hysteresis_mode="sometimes")
    assert "AMP_PLUGIN_HYSTERESIS" not in str(refused.value)
