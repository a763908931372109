"""Each option is defined once, and every list of options shows all of them with types and meanings."""

import copy
import inspect
import math
import pickle
import pydoc
from typing import get_args, get_type_hints

import pytest
import torch
from accelerate import Accelerator

from amp_plugin import (
    AmpAccelerator,
    AmpKwargs,
    AmpPrecision,
    FabricAmpPrecision,
    GradScaler,
    OpRules,
    OptionError,
)
from amp_plugin.adapters.accelerate.settings import accelerators_arguments, resolve
from amp_plugin.adapters.ignite import IgniteOptions, IgnitePrecision
from amp_plugin.kernels.ops import HYSTERESIS_MODES
from amp_plugin.options import (
    KNOWN_VARIABLES,
    AccelerateOptions,
    GradScalerOptions,
    HysteresisMode,
    LossScaleOptions,
    PluginOptions,
    option_defaults,
    option_docs,
    option_names,
    option_types,
)
from docs.api_tables import OPTIONS_PAGE, with_options

CLASSES = {
    GradScaler: GradScalerOptions,
    AmpPrecision: PluginOptions,
    FabricAmpPrecision: PluginOptions,
    IgnitePrecision: IgniteOptions,
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_signature_has_each_option_with_its_type_and_default(kind):
    options = CLASSES[kind]
    shown = inspect.signature(kind).parameters
    assert set(shown) == set(option_names(options))
    assert {name: p.default for name, p in shown.items()} == option_defaults(options)
    assert {name: p.annotation for name, p in shown.items()} == option_types(options)
    assert {**get_type_hints(kind.__init__)} == option_types(options)


def test_the_options_of_the_environment_have_no_defaults_of_their_own():
    shown = inspect.signature(AmpKwargs).parameters
    assert list(shown) == list(option_names(AccelerateOptions))
    assert all(p.default is None and p.kind is p.KEYWORD_ONLY for p in shown.values())
    assert {f"AMP_PLUGIN_{name.upper()}" for name in shown} < set(KNOWN_VARIABLES)


def test_positions_are_those_of_torchs_scaler_and_of_the_stock_plugin():
    import torch

    def positional(kind):
        shown = inspect.signature(kind).parameters.values()
        return [p.name for p in shown if p.kind is not p.KEYWORD_ONLY]

    assert positional(GradScaler) == positional(torch.amp.GradScaler)
    for door in (AmpPrecision, FabricAmpPrecision, IgnitePrecision):
        assert positional(door) == ["precision"]


@pytest.mark.parametrize(("kind", "options"), [*CLASSES.items(), (AmpKwargs, AccelerateOptions)])
def test_help_says_what_each_option_means(kind, options):
    text = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    assert "{options}" not in text
    for name, meaning in option_docs(options).items():
        assert f" {name}: {meaning}" in text


def test_every_adapter_has_the_loss_scales_options_with_its_defaults():
    assert set(get_args(HysteresisMode)) == set(HYSTERESIS_MODES)
    stated = option_defaults(LossScaleOptions)
    for options in (GradScalerOptions, PluginOptions, AccelerateOptions):
        assert stated.items() <= option_defaults(options).items()
    assert (
        AmpPrecision().scaler.loss_scale.options == GradScaler("cpu").loss_scale.options == LossScaleOptions()
    )


def test_the_tables_of_the_documentation_are_up_to_date():
    text = OPTIONS_PAGE.read_text(encoding="utf-8")
    assert with_options(text) == text, "run python -m docs.api_tables"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_scale": "8"}, TypeError, "min_scale='8' is not allowed; give a number or None"),
        ({"dynamic": 1}, TypeError, "dynamic=1 is not allowed; give True or False"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite='stop' is not allowed; give 'skip' or"),
        ({"init_scale": -1.0}, ValueError, "=-1.0 is not allowed; give a finite number, more than 0"),
        ({"init_scal": 1.0}, TypeError, r"'init_scal'; did you mean init_scale\? Allowed are .*growth_inter"),
    ],
)
@pytest.mark.parametrize("make", [GradScaler, AmpPrecision, FabricAmpPrecision])
def test_a_bad_value_is_refused_in_the_same_words(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("option", ["weights", "state", "reduce"])
def test_a_dtype_stands_for_its_word(option):
    options = AmpPrecision("bf16", **{option: torch.bfloat16})
    assert getattr(options.settings, option) == "bf16"


def test_an_option_given_twice():
    with pytest.raises(TypeError, match="GradScaler: multiple values for argument 'device'"):
        GradScaler("cpu", device="cpu")
    with pytest.raises(TypeError, match="GradScaler: too many positional arguments; .* allowed are device, "):
        GradScaler("cpu", 8.0, 2.0, 0.5, 100, True, 1.0)


def test_jsonargparse_shows_and_parses_each_option():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AmpPrecision, "plugin", skip={"scaler"})
    text = " ".join(parser.format_help().split())
    for name, meaning in option_docs(PluginOptions).items():
        if name != "scaler":
            assert f"--plugin.{name} " in text
            assert meaning.split(";")[0][:60] in text
    assert "(type: float, default: 65536.0)" in text
    given = parser.parse_args(["--plugin.init_scale=1024", "--plugin.on_nonfinite=raise"])
    plugin = parser.instantiate(given).plugin
    assert (plugin.settings.init_scale, plugin.settings.on_nonfinite) == (1024.0, "raise")
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args(["--plugin.on_nonfinite=stop"])


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
def test_whole_numbers_may_be_written_as_floats_and_others_are_refused(name):
    scaler, weight = GradScaler("cpu", **{name: 2.0}), torch.nn.Parameter(torch.ones(2))
    for factor in (1.0, math.inf):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(torch.optim.SGD([weight], lr=0.1))
        scaler.update()
    for wrong in (math.inf, math.nan, 1.5, -1, True):
        with pytest.raises((TypeError, ValueError), match=name):
            GradScaler("cpu", **{name: wrong})
        with pytest.raises((TypeError, ValueError), match="max_skips_in_a_row"):
            AccelerateOptions(max_skips_in_a_row=wrong)


class TestErrors:
    """An error about an option contains its name, its value, the allowed values, and the source of the value."""

    @pytest.mark.parametrize(
        ("make", "option", "value", "allowed"),
        [
            (lambda: GradScaler("cpu", growth_factor=0.5), "growth_factor", 0.5, "more than 1"),
            (lambda: GradScaler("cpu", dynamic="maybe"), "dynamic", "maybe", "True or False"),
            (lambda: GradScaler("cpu", min_scale=8.0, max_scale=4.0), "init_scale", 65536.0, "min_scale=8.0"),
            (lambda: AmpPrecision("fp17"), "precision", "fp17", "'fp16', 'bf16', 'fp32'"),
            (lambda: AmpPrecision("fp16", weights="bf16"), "weights", "bf16", "'fp32'"),
            (lambda: AmpPrecision(on_nonfinite="stop"), "on_nonfinite", "stop", "'skip' or 'raise'"),
            (lambda: AmpPrecision(fp32_modules="head"), "fp32_modules", "head", "a list of names"),
            (lambda: FabricAmpPrecision(rules={"rules": {}}), "rules", {"rules": {}}, "a mapping with its keys"),
        ],
    )  # fmt: skip
    def test_it_carries_what_programs_ask_for(self, make, option, value, allowed):
        with pytest.raises(OptionError) as caught:
            make()
        error = caught.value
        assert (error.option, error.value, error.source) == (option, value, "argument")
        assert allowed in error.allowed
        assert option in str(error)
        assert isinstance(error, ValueError)
        for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert (str(copied), vars(copied)) == (str(error), vars(error))

    @pytest.mark.parametrize("plugin", [AmpPrecision, FabricAmpPrecision])
    def test_its_source_is_what_has_set_the_option(self, plugin, monkeypatch, tmp_path):
        file = tmp_path / "amp.yaml"
        file.write_text("growth_factor: 0.5\nhysteresis_mode: sometimes\n")
        monkeypatch.setenv("AMP_PLUGIN_CONFIG", str(file))
        monkeypatch.setenv("AMP_PLUGIN_HYSTERESIS_MODE", "never")
        sources = {
            "hysteresis_mode": "AMP_PLUGIN_HYSTERESIS_MODE",
            "growth_factor": f"AMP_PLUGIN_CONFIG={file}",
        }
        for option, given in (
            ("hysteresis_mode", {"growth_factor": 2.0}),
            ("growth_factor", {"hysteresis_mode": "apex"}),
        ):
            with pytest.raises(OptionError) as caught:
                plugin("fp16", **given)
            assert (caught.value.option, caught.value.source) == (option, sources[option])
            assert f"({option} comes from {sources[option]})" in str(caught.value)

    def test_of_two_options_that_do_not_go_together_each_source_is_told(self, monkeypatch):
        monkeypatch.setenv("AMP_PLUGIN_MIN_SCALE", "8")
        monkeypatch.setenv("AMP_PLUGIN_MAX_SCALE", "4")
        text = r"\(min_scale comes from AMP_PLUGIN_MIN_SCALE; max_scale comes from AMP_PLUGIN_MAX_SCALE\)"
        with pytest.raises(OptionError, match=text):
            AmpPrecision("fp16")


@pytest.mark.parametrize("make", [AmpPrecision, FabricAmpPrecision, AmpKwargs])
def test_rules_may_be_a_mapping_as_a_config_states_them(make):
    stated = {"device_type": "cpu", "rules": {"aten::softmax.int": "fp32"}}
    options = make(rules=stated)
    if isinstance(options, AmpKwargs):
        options, *_ = resolve([options], {})
        rules = options.rules
    else:
        rules = options.settings.rules
    assert rules == OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
    assert rules == OpRules.from_mapping(stated)
    with pytest.raises(
        OptionError, match=r"rules=.*unknown key 'rule'.*; give an OpRules or the path .* keys$"
    ):
        AmpPrecision(rules={"device_type": "cpu", "rule": {}})


def test_an_accelerator_shows_the_arguments_of_accelerates_and_type_checkers_see_the_same():
    own, shown = inspect.signature(Accelerator), inspect.signature(AmpAccelerator)
    assert shown == own
    stated = inspect.signature(accelerators_arguments).parameters
    assert list(stated) == ["self", *own.parameters]
    differ = {name for name in own.parameters if stated[name].default != own.parameters[name].default}
    assert differ == {"split_batches"}  # Accelerate's default means that the option was not given


def test_no_docstring_shows_the_place_of_its_options():
    import amp_plugin

    named = {name: getattr(amp_plugin, name) for name in amp_plugin.__all__}
    assert [name for name, value in named.items() if "{options}" in (value.__doc__ or "")] == []
    assert "sigma: The number of standard deviations" in amp_plugin.Spike.__doc__
