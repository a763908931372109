import os
import re

import pytest
import torch
from accelerate.utils import AutocastKwargs, GradScalerKwargs

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.accelerate.settings import resolve
from amp_plugin.adapters.option_sources import OPTIONS
from tests.adapters.accelerate_pair import prepared, reset


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AMP_PLUGIN_") and name not in {"AMP_PLUGIN_NATIVE", "AMP_PLUGIN_CACHE_DIR"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def decided(handlers, environment):
    """Return the options in force."""
    return resolve(handlers, environment)[0]


def set_options(found, sources):
    """Return the options that were set by any source."""
    return {name: getattr(found, name) for name in sources}


def config_file(tmp_path, text):
    path = tmp_path / "amp.yaml"
    path.write_text(text)
    return {"AMP_PLUGIN_CONFIG": str(path)}


class TestPrecedence:
    def test_each_source_gives_way_to_the_one_before(self, tmp_path):
        file = config_file(tmp_path, "init_scale: 1\nmin_scale: 1\nhysteresis: 4\ngrowth_interval: 5\n")
        scaling = {"AMP_PLUGIN_INIT_SCALE": "2", "AMP_PLUGIN_MIN_SCALE": "2", "AMP_PLUGIN_HYSTERESIS": "2"}
        environment = {**file, **scaling}
        handlers = [GradScalerKwargs(init_scale=3.0), AmpKwargs(init_scale=4.0), AmpKwargs(init_scale=5.0)]
        found, sources, _ = resolve(handlers, environment)
        expected = {"init_scale": 4.0, "min_scale": 2.0, "hysteresis": 2, "growth_interval": 5}
        assert set_options(found, sources) == expected
        assert sources["init_scale"] == "AmpKwargs"
        assert sources["min_scale"] == "AMP_PLUGIN_MIN_SCALE"
        assert sources["growth_interval"] == f"AMP_PLUGIN_CONFIG={tmp_path / 'amp.yaml'}"
        assert decided(handlers[:1], environment).init_scale == 3.0
        assert decided([], environment).init_scale == 2.0
        assert decided([], file).init_scale == 1.0
        others = {"AMP_PLUGIN_NATIVE": "1", "AMP_PLUGIN_CACHE_DIR": "/tmp", "PATH": "x"}
        assert resolve([], others)[1] == {}
        assert repr(handlers[1]) == "AmpKwargs(init_scale=4.0)"

    def test_every_option_can_be_set_by_the_environment(self):
        text = {
            "hysteresis_mode": "megatron",
            "on_min_scale": "raise",
            "on_nonfinite": "raise",
            "on_spike": "clip",
            "dynamic": "false",
            "fp16_gradients": "yes",
            "one_pass": "off",
            "fp32_outputs": "0",
            "exact_schedulers": "1",
            "backoff_factor": "0.25",
            "weights": "bf16",
            "state": "bf16",
            "reduce": "bf16",
            "eval_precision": "bf16-mixed",
            "emulate": "true",
        }
        environment = {
            f"AMP_PLUGIN_{name.upper()}": text.get(name, "16") for name in OPTIONS if name != "rules"
        }
        found, sources, _ = resolve([], environment)
        assert set(sources) == set(OPTIONS) - {"rules"}
        assert (found.dynamic, found.fp32_outputs, found.one_pass) == (False, False, False)
        assert found.on_nonfinite == "raise"
        assert found.on_spike.action == "clip"
        assert type(found.hysteresis) is int

    def test_rules_from_a_file(self, tmp_path):
        path = tmp_path / "rules.yaml"
        path.write_text("device_type: cpu\nrules:\n  aten::mm.default: fp32\n")
        rules = decided([], {"AMP_PLUGIN_RULES": str(path)}).rules
        assert rules["aten::mm.default"].value == "fp32"
        path.write_text("device_type: cpu\nrules:\n  aten::mm.default: fp31\n")
        text = r"rules=.*fp31.*; give an OpRules.*rules comes from AMP_PLUGIN_RULES"
        with pytest.raises(ValueError, match=text):
            resolve([], {"AMP_PLUGIN_RULES": str(path)})


class TestErrorsNameTheirSource:
    @pytest.mark.parametrize(
        ("option", "value", "allowed"),
        [
            ("INIT_SCALE", "much", "much.*; give a number"),
            ("GROWTH_INTERVAL", "2.5", "2.5.*; give a whole number"),
            ("MAX_SKIPS_IN_A_ROW", "-1", "-1 is not allowed; give a"),
            ("EVAL_PRECISION", "fp17", r"eval_precision='fp17' is unknown; allowed are"),
            ("FP32_MODULES", "head,,body", "fp32_modules=.*'body'.* is not allowed; give a list of names"),
        ],
    )
    def test_bad_text(self, option, value, allowed):
        with pytest.raises(ValueError, match=f"{allowed}.*comes from AMP_PLUGIN_{option}"):
            resolve([], {f"AMP_PLUGIN_{option}": value})

    def test_an_unknown_variable(self):
        allowed, hint = "; allowed are AMP_PLUGIN_INIT_SCALE, ", "; did you mean .* or ACCELERATE_MIXED_"
        for name, told in (("AMP_PLUGIN_ZEBRA", allowed), ("AMP_PLUGIN_MIXED_PRECISION", hint)):
            with pytest.raises(ValueError, match=f"{name}.*not an option{told}"):
                resolve([], {name: "1"})

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("init_scal: 1\n", ValueError, r"amp.yaml: unknown option 'init_scal'.*did you mean init_scale"),
            ("mixed_precision: no", ValueError, r"did you mean AmpAccelerator\(mixed_precision="),
            ("a: [", ValueError, r"amp.yaml holds no mapping; write lines such as"),
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

    @pytest.mark.parametrize(
        ("given", "argument_error"),
        [
            ("fp17", " is unknown; allowed are 'no', 'fp8', 'fp16', 'bf16';"),
            ("bf16-true", " keeps.*Use mixed_precision='bf16'.*AmpKwargs(weights='bf16-true')"),
            ("16-true", " keeps.*Use mixed_precision='fp16'.*AmpKwargs(weights='fp16-true')"),
        ],
    )
    def test_a_bad_precision(self, given, argument_error, monkeypatch):
        text = re.escape(argument_error).replace(r"\.\*", ".*")
        with pytest.raises(ValueError, match=f"mixed_precision='{given}'{text}"):
            AmpAccelerator(mixed_precision=given, cpu=True)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
        with pytest.raises(ValueError, match=f"'{given}'{text}.*comes from ACCELERATE_MIXED_PRECISION"):
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


class TestAccelerator:
    def test_kwargs_reach_the_scaler(self):
        kwargs = [GradScalerKwargs(growth_factor=4.0), AmpKwargs(init_scale=32.0, min_scale=2.0)]
        scaler = AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=kwargs).scaler
        assert isinstance(scaler, torch.amp.GradScaler)
        assert (scaler.get_scale(), scaler.get_growth_factor()) == (32.0, 4.0)

    def test_a_disabled_scaler_trains_unscaled(self):
        handlers = [GradScalerKwargs(enabled=False)]
        accelerator = AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers)
        (model,), (optimizer,) = prepared(accelerator)
        accelerator.backward(model(3.0))
        assert accelerator.clip_grad_norm_(model.parameters(), 1e9).item() == 6.0
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        assert not accelerator.last_step(optimizer).skipped
        assert accelerator.amp_metrics() == {"loss_scale": 1.0, "skipped_steps": 0}

    def test_autocast_kwargs_decide_on_models_and_blocks(self):
        handlers = [AutocastKwargs(enabled=False)]
        accelerator = AmpAccelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=handlers)
        accelerator.prepare(model := torch.nn.Linear(2, 1, bias=False))
        exact = torch.tensor([[1.0 + 2.0**-12, 0.0]])
        assert torch.equal(model(exact), model.weight[:, :1].T * exact[0, 0])
        with accelerator.autocast():
            assert not torch.is_autocast_enabled("cpu")
        with accelerator.autocast(AutocastKwargs(enabled=True)):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        accelerator.autocast_handler = None  # Accelerate reads this attribute at each use
        with accelerator.autocast():
            assert torch.is_autocast_enabled("cpu")

    @pytest.mark.native  # without the native core no casts are kept
    @pytest.mark.parametrize("chosen", [None, True, False])
    def test_a_cache_flag_that_is_not_chosen_is_the_one_around_as_in_torch(self, chosen):
        handlers = [AutocastKwargs(cache_enabled=chosen)]
        accelerator = AmpAccelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=handlers)
        seen = []

        class Asking(torch.nn.Module):
            def forward(self):
                seen.append(torch.is_autocast_cache_enabled())

        model = accelerator.prepare(Asking())
        for around in (True, False):
            with torch.autocast("cpu", cache_enabled=around):
                model()
                with accelerator.autocast():
                    seen.append(torch.is_autocast_cache_enabled())
        assert seen == ([True, True, False, False] if chosen is None else [chosen] * 4)

    def test_positional_arguments_are_accelerators_own(self, monkeypatch):
        accelerator = AmpAccelerator(True, False, "fp16", 3, True)
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("fp16", 3)
        reset()
        # stock Accelerate would train in fp32 with this value
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "FP16")
        assert AmpAccelerator(cpu=True).scaler is not None
