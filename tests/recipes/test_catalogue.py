"""Every recipe: its configs, its first steps against golden losses, and its whole run in three precisions.

``PYTHONPATH=. python tests/recipes/test_catalogue.py NAME...`` writes new golden losses of the recipes. On
another machine, fp32 agrees within 1e-3, and fp16 and bf16 within their rounding; see ``TOLERANCE``.
"""

import importlib
import json
import re
import sys
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml

from recipes import catalogue
from recipes.bounds import bounds_of
from recipes.config import load_config
from recipes.shared import ConfigError, Precision
from tests import warm_processes
from tests.recipes.command_line import on_the_command_line, train_and_print

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/assets/golden_losses.json"
TEXT = ROOT / "LICENSE"
PRECISIONS = [precision.value for precision in Precision]
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}  # relative, over three steps
QUICK = {
    "compiled": ["backend=aot_eager"],
    "ddp": ["processes=1"],
    "fsdp2": ["processes=1"],
    "fsdp2_exact_bf16": ["processes=1"],
}
WITHOUT_CPU = {"cuda_graph"}
SEVERAL = ("ddp", "fsdp2", "fsdp2_exact_bf16")
LEARNT, NEARLY = ("test_accuracy", (0.92, 1), 0.03), ("test_accuracy", (0.90, 1), 0.04)
FINAL = {  # what a run must reach, the allowed range, and how far fp16 and bf16 may be from fp32
    **dict.fromkeys(
        ["typical_training", "accumulation", "threads", "ddp", "fsdp2", "fsdp2_exact_bf16"], LEARNT
    ),
    **dict.fromkeys(["compiled", "inference"], LEARNT),
    **dict.fromkeys(["clipping", "gradient_penalty", "several_losses", "several_models"], NEARLY),
    **dict.fromkeys(["custom_functions", "fp32_module", "lbfgs"], NEARLY),
    "diagnose": ("test_accuracy", (0.88, 1), 0.04),
    "wgan_gp": ("samples read as the digit asked for", (0.75, 1), 0.15),
    "char_gpt": ("bits per character, held out", (1.5, 3.0), 0.1),
    "stored_weights": ("weights moved, fp32", (0.99, 1), 0.005),
    "below_16_bits": ("loss of the digits, mxfp8", (0.9, 1.05), 0.001),
    "compressed_state": ("bytes per parameter, state=8bit", (10, 10.5), 0.001),
}
ON_CPU = [name for name in catalogue.NAMES if name not in WITHOUT_CPU]
PLAIN = [name for name in ON_CPU if name == catalogue.plain_name(name)]
FORMS = [name for name in ON_CPU if name not in PLAIN]


def config_of(name, precision, *overrides):
    path = ROOT / f"configs/{catalogue.plain_name(name)}.yaml"
    return load_config(catalogue.load(name).Config, path, [f"precision={precision}", *overrides])


def first_losses(name, precision):
    recipe, quick = catalogue.load(name), QUICK.get(name, [])
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(recipe, "topics"):  # Python's own help text differs between versions
            patch.setattr(recipe, "topics", {"text": TEXT.read_text()})
        return recipe.train(config_of(name, precision, "steps=3", *quick)).losses


# -- configs ------------------------------------------------------------------------------------


def test_there_are_configs_of_recipes_alone():
    stems = {path.stem for path in (ROOT / "configs").iterdir()} - {"accelerate", "hydra", "train_digits"}
    assert stems == {catalogue.plain_name(name) for name in catalogue.NAMES}
    assert set(FINAL) == set(PLAIN)


@pytest.mark.parametrize("name", [*PLAIN, *WITHOUT_CPU])
def test_a_config_sets_every_key_to_its_default_and_explains_it(name):
    schema = catalogue.load(name).Config
    path = ROOT / f"configs/{name}.yaml"
    assert load_config(schema, path) == schema()
    text = path.read_text()
    for path, _, default in keys_of(schema()):
        key = path.rpartition(".")[2]
        line = re.search(rf"^ *{key}:.*# (.+)$", text, re.MULTILINE)
        assert line, f"{key} is missing or has no comment"
        if not is_dataclass(default):
            kind, said, meaning = re.match(r"(.+?), default ([^:]+)(.*)", line[1]).groups()
            if isinstance(default, Enum):
                assert kind == " | ".join(member.value for member in type(default))
                assert said == default.value
            else:
                assert kind.partition("[")[0] == type(default).__name__
                assert yaml.safe_load(said) == default
            assert len(meaning) > len(": seed")


def keys_of(config, prefix=""):
    """Return the key, the class and the default of each value in a config."""
    for field in fields(config):
        default = getattr(config, field.name)
        yield prefix + field.name, type(config), default
        if is_dataclass(default):
            yield from keys_of(default, f"{prefix}{field.name}.")


@pytest.mark.parametrize("name", [*PLAIN, *WITHOUT_CPU])
def test_every_number_of_a_config_has_bounds_that_its_default_keeps(name):
    for key, schema, default in keys_of(catalogue.load(name).Config()):
        if isinstance(default, bool) or not isinstance(default, int | float | list):
            continue
        bounds = bounds_of(schema, key.rpartition(".")[2])
        assert bounds is not None, f"{name}: {key}"
        assert bounds.hold(default)
        wrong = [4, -1] if isinstance(default, list) else -1
        for value in (wrong, "nan") if isinstance(default, float) else (wrong,):
            with pytest.raises(ConfigError) as error:
                config_of(name, "fp16", f"{key}={value}")
            expected = f"command line: {key}={value} is not allowed; it must be {bounds}"
            assert str(error.value) == expected


@pytest.mark.parametrize(
    ("name", "override", "allowed"),
    [
        ("clipping", "steps=0", "at least 1"),
        ("clipping", "learning_rate=inf", "above 0"),
        ("clipping", "width=6", "at least 4 and a multiple of 4"),
        ("clipping", "loss_scale.init_scale=1e+39", "at most 3.40282e+38 and above 0"),
        ("clipping", "loss_scale.backoff_factor=1", "above 0 and below 1"),
        ("compiled", "batch_size=1258", "at least 1 and at most 1,257"),
        ("several_models", "widths=[4]", "2 numbers, each at least 4 and a multiple of 4"),
    ],
)
def test_a_number_out_of_bounds_is_named(name, override, allowed):
    message = re.escape(override) + r" is not allowed; it must be " + re.escape(allowed) + "$"
    with pytest.raises(ConfigError, match=message):
        config_of(name, "fp16", override)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("char_gpt", "heads=5", "width=48 is not allowed; it must be a multiple of heads=5"),
        ("char_gpt", "context=1000000", r"=1000000 is not allowed; the text held out has \d+,\d+ char"),
        ("stored_weights", "context=1000000", r"=1000000 is not allowed; the text has \d+,\d+ char"),
        ("compiled", "backend=induktor", "backend=induktor is not known; torch has .*inductor"),
        ("clipping", "device=meta", "device=meta, but torch .* finds no such device here; use device=cpu"),
    ],
)
def test_values_that_do_not_go_together_are_named(name, override, message):
    with pytest.raises(ConfigError, match=message):
        catalogue.load(name).train(config_of(name, "bf16", override))


def test_a_folder_that_cannot_be_made_is_named_before_the_training(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(catalogue.load("clipping"), "train", lambda config: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match="2"):
        catalogue.run("clipping", [f"output={tmp_path}/file"])
    told = r": output=.*file is not allowed; .*clipping_fp16 cannot be made: Not a"
    assert re.search(told, capsys.readouterr().err)


def test_a_key_written_as_an_option_is_answered_with_how_to_write_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        catalogue.run("clipping", ["max_norm=2", "--steps", "10"])
    told = "run clipping: unknown option '--steps'; keys .* no dashes, write steps=10"
    assert re.search(told, capsys.readouterr().err)


# -- first steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_the_first_losses_are_the_golden_ones(name, precision):
    golden = json.loads(GOLDEN.read_text())[name][precision]
    losses = first_losses(name, precision)
    # the loss of the third step differs by a quarter between processors
    if name == "lbfgs" and precision != "fp32":
        assert losses[2] < 2 * golden[2]
        losses, golden = losses[:2], golden[:2]
    assert losses == pytest.approx(golden, rel=TOLERANCE[precision])


@pytest.mark.dist
@pytest.mark.parametrize(("name", "by_torchrun"), [("ddp", False), ("ddp", True), ("fsdp2", True)])
def test_two_processes_have_the_losses_of_one(name, by_torchrun):
    golden, words = json.loads(GOLDEN.read_text())[name]["fp16"], ["precision=fp16", "steps=3"]
    if by_torchrun:
        ended = warm_processes.call_on_ranks(2, 200, train_and_print, name, words)
    else:
        ended = [warm_processes.call(train_and_print, name, [*words, "processes=2"], frameworks=True)]
    for process in ended:
        assert process.returncode == 0, process.stderr
        title, losses = json.loads(process.stdout.splitlines()[-1])
        assert losses == pytest.approx(golden, rel=TOLERANCE["fp16"])
        assert "2 processes" in title


@pytest.mark.parametrize("name", SEVERAL)
def test_more_processes_than_gpus_are_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = replace(config_of(name, "fp16", "processes=2"), device="cuda")
    with pytest.raises(ConfigError, match="2 processes need a GPU each.*has 1: set processes=1"):
        catalogue.load(name).train(config)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FORMS)
def test_a_framework_s_form_has_the_losses_of_the_plain_one(name, precision):
    def run(which):
        options = ("loss_scale.growth_interval=5", "steps=12")
        return catalogue.load(which).train(config_of(which, precision, *options))

    plain, form = run(catalogue.plain_name(name)), run(name)
    # The critic is called three times per step. In one form its calls share the cast of a weight; in the
    # other each has its own.
    rounding = 1e-2 if name.startswith("wgan_gp") and precision != "fp32" else 0
    assert form.losses == pytest.approx(plain.losses, abs=rounding, rel=0)
    assert form.loss_scales == plain.loss_scales
    assert form.skipped == plain.skipped
    assert form.curves.keys() == plain.curves.keys()
    assert form.test_accuracy == plain.test_accuracy


# -- whole runs ---------------------------------------------------------------------------------

WHOLE = [pytest.param(name, marks=pytest.mark.dist) if name in SEVERAL else name for name in PLAIN]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_ends_well_and_the_precisions_agree(name, tmp_path):
    key, (least, most), tolerance = FINAL[name]
    reached = {}
    for precision in PRECISIONS:
        alone = ["processes=1"] if name in SEVERAL and precision != "fp16" else []
        record = catalogue.load(name).train(config_of(name, precision, *alone))
        assert bool(record.loss_scales) == (precision == "fp16")
        assert len(record.skipped) < len(record.losses) / 10
        numbers = record.as_dict()
        reached[precision] = numbers[key] if key in numbers else numbers["results"][key]
        for path in record.save(tmp_path / precision):
            assert path.suffix == ".json" or 500 < path.stat().st_size < 80_000, path
        saved = json.loads((tmp_path / precision / "result.json").read_text())
        assert saved == json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert least <= min(reached.values()) <= max(reached.values()) <= most, reached
    assert reached["fp16"] == pytest.approx(reached["fp32"], abs=tolerance), reached
    assert reached["bf16"] == pytest.approx(reached["fp32"], abs=tolerance), reached


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.parametrize("name", FORMS)
def test_a_form_s_whole_run_ends_well(name):
    key, (least, most), _ = FINAL[catalogue.plain_name(name)]
    numbers = catalogue.load(name).train(config_of(name, "bf16")).as_dict()
    assert least <= (numbers[key] if key in numbers else numbers["results"][key]) <= most


# -- a CUDA graph -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision", [*(pytest.param(half, marks=pytest.mark.whole_run) for half in ("fp16", "bf16")), "fp32"]
)
def test_cuda_graph_learns_the_digits(precision):
    record = catalogue.load("cuda_graph").train(config_of("cuda_graph", precision))
    assert bool(record.loss_scales) == (precision == "fp16")
    assert record.test_accuracy >= 0.92


@pytest.mark.gpu
def test_cuda_graph_skips_an_overflow_on_replay():
    config = config_of("cuda_graph", "fp16", "loss_scale.init_scale=1e9", "steps=60")
    record = catalogue.load("cuda_graph").train(config)
    assert record.skipped
    assert record.loss_scales[-1] < 1e9
    assert record.losses[-1] < record.losses[0]


# -- command line -------------------------------------------------------------------------------


def test_list_and_run_from_the_command_line(tmp_path):
    calls = (
        ["list"],
        ["run", "clipping", "max_nrom=1"],
        ["run", "cuda_graph", "device=cpu"],
        ["run", "typical_training", "steps=2", f"output={tmp_path}", "precision=bf16"],
    )
    listed, wrong, graph, ran = (
        warm_processes.call(on_the_command_line, words, frameworks=True) for words in calls
    )
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines() if re.match(r" [a-z]", line)]
    assert names == list(catalogue.NAMES)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("python -m recipes run clipping: command line: unknown key 'max_nrom'; ")
    assert graph.returncode == 2
    assert graph.stderr.startswith("python -m recipes run cuda_graph: a CUDA graph needs device=cuda and")
    assert ran.returncode == 0, ran.stderr
    assert "arning" not in ran.stderr.replace("amp_plugin's native core", "")
    written = {path.name for path in (tmp_path / "typical_training_bf16").iterdir()}
    assert written == {"result.json", "training.png"}


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no recipe 'cliping'; did you mean clipping\? .*typical_training"):
        catalogue.load("cliping")


@pytest.mark.parametrize("name", catalogue.NAMES)
def test_a_recipe_needs_one_file_next_to_it(name):
    text = (ROOT / f"recipes/{name}.py").read_text()
    assert set(re.findall(r"^(?:from|import) (recipes[.\w]*)", text, re.MULTILINE)) == {"recipes.shared"}


def test_a_recipe_runs_where_it_was_taken(tmp_path, monkeypatch):
    for name in ("shared", "gradient_penalty"):
        text = (ROOT / f"recipes/{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(text.replace("from recipes.shared import", "from shared import"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("shared", "gradient_penalty"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    taken = importlib.import_module("gradient_penalty")
    taken.train(taken.Config(steps=2)).show(tmp_path / "runs")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"result.json", "training.png"}
    assert not [name for name in vars(taken) if name.startswith("recipes")]


def test_each_recipe_is_short_and_says_in_one_line_what_it_shows():
    for name in catalogue.NAMES:
        assert len((ROOT / f"recipes/{name}.py").read_text().splitlines()) <= 150
        assert 30 < len(catalogue.about(name)) <= 100


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for wanted in sys.argv[1:] or PLAIN:
        known[wanted] = {precision: first_losses(wanted, precision) for precision in PRECISIONS}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
