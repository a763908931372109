"""DeepSpeed under AmpAccelerator:

its config gets our options, its engine our scaler, and our log its steps.
"""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from amp_plugin import OpRules, Spike
from amp_plugin.adapters.accelerate import AmpKwargs, deepspeed
from amp_plugin.adapters.accelerate.deepspeed import scale_of, scaler_for_engine, steps_noted, translate
from amp_plugin.adapters.accelerate.settings import resolve
from amp_plugin.adapters.session import Session
from amp_plugin.options import AccelerateOptions, LossScaleOptions, option_names
from tests.adapters import deepspeed_run
from tests.warm_processes import call_on_ranks

FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
ZERO = {"zero_optimization": {"stage": 2}}


def translated(config, **options):
    config = json.loads(json.dumps(config))
    given, sources, _ = resolve([AmpKwargs(**options)], {})
    translate(Session(given, "fp32", sources=sources), config)
    return config


def test_each_option_stands_in_one_table():
    tables = (
        deepspeed.INSTEAD,
        deepspeed.FP16_KEYS,
        deepspeed.FIXED,
        deepspeed.IN_AUTOCAST,
        deepspeed.IN_OTHER_WAYS,
        deepspeed.BY_OUR_LOG,
    )
    listed = [option for table in tables for option in table]
    assert sorted(listed) == sorted(option_names(AccelerateOptions))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {}),
        ({"init_scale": 256.0, "growth_interval": 7}, {"initial_scale_power": 8, "loss_scale_window": 7}),
        ({"min_scale": 4.0, "hysteresis": 3}, {"min_loss_scale": 4, "hysteresis": 3}),
        ({"hysteresis_mode": "apex"}, {"consecutive_hysteresis": True}),
        ({"hysteresis_mode": "deepspeed"}, {"consecutive_hysteresis": False}),
        ({"dynamic": False, "init_scale": 256.0}, {"loss_scale": 256.0, "initial_scale_power": 8}),
        ({"growth_factor": 2.0, "backoff_factor": 0.5, "max_skips_in_a_row": 3}, {}),
        ({"on_nonfinite": "raise"}, {}),
    ],
)
def test_options_of_the_loss_scale_are_written_into_its_section(options, keys):
    for section in (FP16, {"fp16": {"enabled": True, **dict.fromkeys(keys, "auto")}}):
        assert translated(section, **options)["fp16"] == {"enabled": True, **keys}


@pytest.mark.parametrize(("given", "checks"), [("skip", True), ("raise", True), ("ignore", False)])
def test_bf16_is_told_whether_to_check(given, checks):
    assert translated(BF16 | ZERO, on_nonfinite=given)["bf16"]["check_grad_overflow"] is checks


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (FP16, {"init_scale": 100.0}, "init_scale=100.0 has no effect .*'initial_scale_power' of 'fp16' takes powers of 2"),
        (FP16, {"min_scale": 0.5}, "'min_loss_scale' of 'fp16' takes whole numbers"),
        (FP16, {"hysteresis_mode": "megatron"}, "'consecutive_hysteresis' of 'fp16' takes apex, deepspeed"),
        (FP16, {"growth_factor": 4.0}, "growth_factor=4.0 has no effect .*no key there, and is always 2.0"),
        (FP16, {"max_scale": 2.0**20}, "max_scale=1048576.0 .* no key"),
        (FP16, {"rules": OpRules.default("cpu")}, "'torch_autocast'"),
        (BF16, {"fp32_modules": ["LayerNorm"]}, "fp32_modules=.*'enabled' of 'torch_autocast'"),
        (BF16, {"weights": "bf16"}, r"weights='bf16' has no effect under DeepSpeed \(from AmpKwargs\).*'bf16_master_"),
        (BF16, {"state": "bf16"}, "state='bf16' has no effect .*'bf16_optimizer_states'"),
        (FP16, {"reduce": "bf16"}, "'communication_data_type'"),
        (FP16, {"eval_precision": "fp32"}, "'dtype' of 'torch_autocast'"),
        (FP16, {"on_nonfinite": "ignore"}, "on_nonfinite='ignore' has no effect .*fp16 always checks"),
        (ZERO, {"on_nonfinite": "raise"}, "fp32 never"),
        (AUTOCAST | ZERO, {"init_scale": 4.0}, "init_scale=4.0 .*'stage' of 'zero_optimization' to 0"),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, {"hysteresis": 4}, "disagrees with DeepSpeed's 'hysteresis': 2"),
    ],
)  # fmt: skip
def test_what_cannot_act_is_an_error_that_names_the_key(config, options, text):
    with pytest.raises(ValueError, match=text):
        translated(config, **options)


@pytest.mark.parametrize("config", [{}, AUTOCAST])
def test_where_our_scaler_steps_all_of_its_options_act(config):
    assert translated(config, init_scale=100.0, growth_factor=4.0, on_nonfinite="ignore") == config


@pytest.mark.parametrize(("clip", "told"), [(0.5, 1), (0.0, 0)])
def test_clipping_in_its_unfused_optimizer_is_warned_of(clip, told, recwarn):
    optimizer = type("FP16_UnfusedOptimizer", (), {"cur_scale": 256.0})()
    engine = SimpleNamespace(optimizer=optimizer, gradient_clipping=lambda: clip)
    warnings.simplefilter("always")
    deepspeed.warn_of_defects(engine)
    assert scale_of(engine) == 256.0
    assert sum("'stage' of 'zero_optimization' to 1" in str(warning.message) for warning in recwarn) == told


def observed(**options):
    """Return an engine that steps SGD, and the scaler whose log gets its steps."""
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.cur_scale = 256.0
    seen = {"module": module, "optimizer": optimizer, "global_steps": 0, "skipped_steps": 0}
    engine = SimpleNamespace(**seen, gradient_clipping=lambda: 0.0, get_global_grad_norm=lambda: 3.0)
    session = Session(AccelerateOptions(**options), "fp32")
    return engine, scaler_for_engine(engine, session, FP16)


def skip(engine, scaler):
    with steps_noted(engine, scaler):
        engine.global_steps, engine.skipped_steps = engine.global_steps + 1, engine.skipped_steps + 1


CHANGED = {
    "init_scale": 2.0**18,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_scale": 2.0**17,
    "max_scale": 2.0**19,
    "hysteresis": 3,
    "hysteresis_mode": "deepspeed",
    "on_min_scale": "raise",
    "dynamic": False,
    "fp16_gradients": True,
    "one_pass": False,
    "on_nonfinite": "raise",
    "on_spike": Spike(sigma=9.0),
    "log": print,
}


def test_the_scaler_that_observes_gets_each_option_of_a_loss_scale():
    assert CHANGED.keys() == {*option_names(LossScaleOptions)}, "give the new option another value here"
    _, scaler = observed(**CHANGED)
    assert {name: getattr(scaler.core.shared.options, name) for name in CHANGED} == CHANGED


def test_each_other_option_of_our_log_acts(tmp_path):
    others = {*deepspeed.BY_OUR_LOG} - {*option_names(LossScaleOptions)}
    assert others == {"max_skips_in_a_row", "report"}, "test the new option here"
    engine, scaler = observed()
    session = Session(AccelerateOptions(max_skips_in_a_row=2), "fp32")
    session.take_scaler(scaler)
    page = session.watch([torch.nn.Linear(1, 1)], tmp_path / "run.html")
    skip(engine, scaler)
    with pytest.raises(RuntimeError, match="2 steps"):
        skip(engine, scaler)
    session.end(warn=None)
    assert "SGD" in page.read_text()


def test_at_a_static_scale_a_step_that_is_not_finite_raises():
    engine, scaler = observed(on_nonfinite="raise", dynamic=False)
    with pytest.raises(FloatingPointError, match="at a loss scale of 256"):
        skip(engine, scaler)


def test_the_engines_last_step_is_told_with_its_norm_and_scale():
    records = []
    engine, scaler = observed(log=records.append)
    optimizer = engine.optimizer
    with pytest.raises(RuntimeError, match="has not stepped"):
        scaler.last_step(optimizer)
    for skips in (0, 1):
        with steps_noted(engine, scaler):
            pass  # a micro-batch in which the engine does not step
        with steps_noted(engine, scaler):
            engine.global_steps, engine.skipped_steps = engine.global_steps + 1, skips
            optimizer.cur_scale /= 2 if skips else 1
        told = scaler.last_step(optimizer)
        assert (told.skipped, float(told.norm), told.scale_before) == (bool(skips), 3.0, 256.0)
        assert told.scale_after == optimizer.cur_scale
    assert scaler.skipped_steps() == 1
    assert [(record.step, record.optimizer, record.skipped) for record in records] == [
        (1, "0: SGD", False),
        (2, "0: SGD", True),
    ]
    assert [(record.loss_scale, record.norm) for record in records] == [(256.0, 3.0), (256.0, 3.0)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the worker's results for each config. The worker is a process of its own."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    file = tmp_path_factory.mktemp("deepspeed") / "seen.json"
    (done,) = call_on_ranks(1, 300, deepspeed_run.main, file)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


IN_ENGINE = ["autocast fp16", "autocast bf16", "fp32"]
OBSERVED = ["fp16", "fp16 in ZeRO", "bf16 in ZeRO", "autocast fp16 in ZeRO"]


@pytest.mark.slow
class TestRuns:
    @pytest.mark.parametrize("run", IN_ENGINE + OBSERVED)
    def test_a_poisoned_batch_is_skipped_and_told(self, runs, run):
        steps = runs[run]["steps"]
        assert [step["skipped"] for step in steps] == [[i == 1, i == 1] for i in range(4)]
        assert [step["metrics"]["skipped_steps"] for step in steps] == [0, 1, 1, 1]
        assert steps[1]["moved"] == 0.0
        assert [step["rate"] for step in steps] == [0.25, 0.25, 0.125, 0.0625]

    @pytest.mark.parametrize("run", ["fp16", "fp16 in ZeRO", "bf16 in ZeRO", *IN_ENGINE])
    def test_norms_are_those_of_unscaled_and_unclipped_gradients(self, runs, run):
        assert runs[run]["steps"][0]["norm"] == pytest.approx(runs["fp32"]["steps"][0]["norm"], rel=0.01)

    def test_scales_follow_our_options(self, runs):
        for run, scale in (("autocast fp16", 1024.0), ("fp16 in ZeRO", 256.0)):
            half = scale / 2
            expected = [[scale, scale], [scale, half], [half, half], [half, scale]]
            assert [step["scales"] for step in runs[run]["steps"]] == expected

    def test_deepspeeds_own_scaler_in_zero_clips_scaled_gradients(self, runs):
        right, seen = runs["autocast fp16"], runs["autocast fp16 in ZeRO"]
        assert seen["steps"][0]["moved"] == pytest.approx(right["steps"][0]["moved"] / 65536, rel=0.05)
        assert any("clips gradients while they are multiplied" in text for text in seen["told"])

    def test_its_unfused_optimizer_moves_too_little_where_it_clips(self, runs):
        assert runs["fp16"]["steps"][0]["moved"] < runs["fp32"]["steps"][0]["moved"] / 20
        assert any("unfused optimizer" in text for text in runs["fp16"]["told"])

    def test_rules_and_fp32_modules_act_in_its_autocast(self, runs):
        assert runs["autocast fp16"]["steps"][0]["output"] == "torch.float16"
        for run in ("autocast fp16, rules", "autocast fp16, fp32 modules"):
            assert runs[run]["steps"][0]["output"] == "torch.float32"

    def test_nothing_is_checked_where_that_was_asked_for(self, runs):
        for run in ("fp32, ignored", "bf16, ignored"):
            assert str(runs[run]["steps"][1]["moved"]) == "nan"

    @pytest.mark.parametrize(
        ("run", "text"),
        [
            ("bf16, raised", "FloatingPointError: .*gradients are not finite"),
            ("fp16, endless", r"RuntimeError: 2 steps of \w+ in a row .*AmpKwargs\(max_skips_in_a_row"),
            ("autocast fp16, endless", r"RuntimeError: 2 steps of \w+ in a row .*inf in 2 gradients: 0.bias, 0.weight"),
        ],
    )  # fmt: skip
    def test_endless_skips_and_raised_ones(self, runs, run, text):
        with pytest.raises(RuntimeError, match=text):
            raise RuntimeError(runs[run]["error"])
