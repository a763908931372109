import os

import pytest
import torch
from accelerate.utils import AutocastKwargs, GradScalerKwargs

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.accelerate.settings import resolve
from amp_plugin.adapters.option_sources import OPTIONS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AMP_PLUGIN_") and name not in {"AMP_PLUGIN_NATIVE", "AMP_PLUGIN_CACHE_DIR"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def set_options(found):
    """Return the options that some source has set."""
    return {name: getattr(found, name) for name in found.sources}


def config_file(tmp_path, text):
    path = tmp_path / "amp.yaml"
    path.write_text(text)
    return {"AMP_PLUGIN_CONFIG": str(path)}


class TestPrecedence:
    def test_each_source_gives_way_to_the_one_before(self, tmp_path):
        file = config_file(tmp_path, "init_scale: 1\nmin_scale: 1\nhysteresis: 4\ngrowth_interval: 5\n")
        environment = {
            **file,
            "AMP_PLUGIN_INIT_SCALE": "2",
            "AMP_PLUGIN_MIN_SCALE": "2",
            "AMP_PLUGIN_HYSTERESIS": "2",
        }
        handlers = [GradScalerKwargs(init_scale=3.0), AmpKwargs(init_scale=4.0)]
        found = resolve(handlers, environment)
        assert set_options(found) == {
            "init_scale": 4.0,
            "min_scale": 2.0,
            "hysteresis": 2,
            "growth_interval": 5,
        }
        assert found.sources["init_scale"] == "AmpKwargs"
        assert found.sources["min_scale"] == "AMP_PLUGIN_MIN_SCALE"
        assert found.sources["growth_interval"] == f"AMP_PLUGIN_CONFIG={tmp_path / 'amp.yaml'}"
        assert resolve(handlers[:1], environment).init_scale == 3.0
        assert resolve([], environment).init_scale == 2.0
        assert resolve([], file).init_scale == 1.0
        assert resolve([], {}).sources == {}

    def test_every_option_can_be_set_by_the_environment(self):
        text = {
            "hysteresis_mode": "megatron",
            "on_min_scale": "raise",
            "on_nonfinite": "ignore",
            "dynamic": "false",
            "fp16_gradients": "yes",
            "one_pass": "off",
            "fold_clip": "on",
            "fp32_outputs": "0",
            "exact_schedulers": "1",
            "weights": "bf16",
            "state": "bf16",
            "reduce": "bf16",
            "backoff_factor": "0.25",
            "eval_precision": "bf16-mixed",
        }
        environment = {
            f"AMP_PLUGIN_{name.upper()}": text.get(name, "16") for name in OPTIONS if name != "rules"
        }
        found = resolve([], environment)
        assert set(found.sources) == set(OPTIONS) - {"rules"}
        assert found.dynamic is False
        assert found.fp32_outputs is False
        assert found.one_pass is False
        assert found.on_nonfinite == "ignore"
        assert type(found.hysteresis) is int

    def test_rules_from_a_file(self, tmp_path):
        path = tmp_path / "rules.yaml"
        path.write_text("device_type: cpu\nrules:\n  aten::mm.default: fp32\n")
        rules = resolve([], {"AMP_PLUGIN_RULES": str(path)}).rules
        assert rules["aten::mm.default"].value == "fp32"


class TestErrorsNameTheirSource:
    @pytest.mark.parametrize(
        ("variable", "value", "allowed"),
        [
            ("AMP_PLUGIN_INIT_SCALE", "much", "give a number"),
            ("AMP_PLUGIN_GROWTH_INTERVAL", "2.5", "give a whole number"),
            ("AMP_PLUGIN_DYNAMIC", "maybe", "give True or False"),
            ("AMP_PLUGIN_HYSTERESIS_MODE", "nvidia", "give 'apex' or 'megatron' or 'deepspeed'"),
            ("AMP_PLUGIN_ON_NONFINITE", "stop", "give 'skip' or 'raise' or 'ignore'"),
        ],
    )
    def test_bad_text(self, variable, value, allowed):
        with pytest.raises(ValueError, match=f"{value}.*; {allowed}.*comes from {variable}"):
            resolve([], {variable: value})

    def test_a_negative_limit_of_skips(self, monkeypatch):
        monkeypatch.setenv("AMP_PLUGIN_MAX_SKIPS_IN_A_ROW", "-1")
        text = r"max_skips_in_a_row=-1 is not allowed; .*comes from AMP"
        with pytest.raises(ValueError, match=text):
            AmpAccelerator(mixed_precision="bf16", cpu=True)

    @pytest.mark.parametrize(
        ("variable", "message"),
        [
            ("AMP_PLUGIN_INITSCALE", "AMP_PLUGIN_INITSCALE.*did you mean AMP_PLUGIN_INIT_SCALE"),
            ("AMP_PLUGIN_LOSS", "AMP_PLUGIN_LOSS.*not an option; allowed are AMP_PLUGIN_INIT_SCALE, .*"),
        ],
    )
    def test_an_unknown_variable(self, variable, message):
        with pytest.raises(ValueError, match=message):
            resolve([], {variable: "1"})

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_a_number_the_scaler_refuses_is_an_error_in_any_precision(self, precision, monkeypatch):
        monkeypatch.setenv("AMP_PLUGIN_GROWTH_FACTOR", "0.5")
        with pytest.raises(ValueError, match=r"growth_factor comes from AMP_PLUGIN_GROWTH_FACTOR"):
            AmpAccelerator(mixed_precision=precision, cpu=True)

    def test_variables_of_other_parts_are_left_alone(self):
        found = resolve([], {"AMP_PLUGIN_NATIVE": "1", "AMP_PLUGIN_CACHE_DIR": "/tmp", "PATH": "x"})
        assert found.sources == {}

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("init_scal: 1\n", ValueError, r"amp.yaml: unknown option 'init_scal'.*did you mean init_scale"),
            ("1024\n", ValueError, "holds no mapping"),
            (None, FileNotFoundError, r"AMP_PLUGIN_CONFIG=.*amp.yaml is not a file"),
        ],
    )
    def test_a_bad_file(self, text, error, message, tmp_path):
        file = config_file(tmp_path, text or "")
        if text is None:
            (tmp_path / "amp.yaml").unlink()
        with pytest.raises(error, match=message):
            resolve([], file)

    def test_bad_rules(self, tmp_path):
        path = tmp_path / "rules.yaml"
        path.write_text("device_type: cpu\nrules:\n  aten::mm.default: fp31\n")
        with pytest.raises(
            ValueError, match=r"rules=.*fp31.*; give an OpRules.*rules comes from AMP_PLUGIN_RULES"
        ):
            resolve([], {"AMP_PLUGIN_RULES": str(path)})

    def test_a_bad_precision_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "amp_fp16")
        with pytest.raises(
            ValueError, match=r"ACCELERATE_MIXED_PRECISION='amp_fp16'.*allowed are no, fp8, fp16, bf16"
        ):
            AmpAccelerator(cpu=True)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: AmpAccelerator(mixed_precison="fp16"),
                r"AmpAccelerator: unknown option 'mixed_precison'; did you mean mixed_precision\? Allowed are ",
            ),
            (
                lambda: AmpAccelerator(init_scale=8.0),
                r"'init_scale' is an option of AmpKwargs: write .*kwargs_handlers=\[AmpKwargs\(init_scale=",
            ),
            (lambda: AmpAccelerator(*[None] * 40), "AmpAccelerator: too many positional arguments"),
            (
                lambda: AmpKwargs(init_scal=8.0),
                r"AmpKwargs: unknown option 'init_scal'; did you mean init_scale\? Allowed are init_scale, ",
            ),
        ],
    )
    def test_misspelt_arguments(self, make, message):
        with pytest.raises(TypeError, match=message):
            make()

    def test_a_bad_precision_by_argument(self):
        with pytest.raises(ValueError, match="Unknown mixed_precision mode: fp17"):
            AmpAccelerator(mixed_precision="fp17", cpu=True)


class TestAccelerator:
    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_precision_from_the_environment(self, precision, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        accelerator = AmpAccelerator(cpu=True)
        assert accelerator.mixed_precision == precision
        assert (accelerator.scaler is not None) == (precision == "fp16")
        assert accelerator.native_amp == (precision != "no")

    def test_kwargs_reach_the_scaler(self):
        kwargs = [GradScalerKwargs(growth_factor=4.0), AmpKwargs(init_scale=32.0, min_scale=2.0)]
        scaler = AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=kwargs).scaler
        assert isinstance(scaler, torch.amp.GradScaler)
        assert (scaler.get_scale(), scaler.get_growth_factor()) == (32.0, 4.0)

    def test_a_disabled_scaler_trains_unscaled(self):
        handlers = [GradScalerKwargs(enabled=False)]
        accelerator = AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers)
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1e9).item() == pytest.approx(3**0.5)
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        assert not accelerator.last_step(optimizer).skipped
        assert accelerator.amp_metrics() == {"loss_scale": 1.0, "skipped_steps": 0}

    def test_autocast_kwargs_disable_the_region(self):
        handlers = [AutocastKwargs(enabled=False)]
        accelerator = AmpAccelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=handlers)
        with accelerator.autocast():
            assert not torch.is_autocast_enabled("cpu")
        with accelerator.autocast(AutocastKwargs(enabled=True)):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16

    def test_positional_arguments_are_accelerators_own(self):
        accelerator = AmpAccelerator(True, False, "fp16", 3, True)
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("fp16", 3)

    def test_two_amp_kwargs_the_first_wins(self):
        handlers = [AmpKwargs(init_scale=2.0), AmpKwargs(init_scale=4.0, hysteresis=2)]
        assert set_options(resolve(handlers, {})) == {"init_scale": 2.0, "hysteresis": 2}
