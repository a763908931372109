"""Every recipe: its configs, its first steps against golden losses, its whole run in three precisions.

``PYTHONPATH=. python tests/recipes/test_catalogue.py NAME...`` writes the golden losses of the recipes anew (fp32 within
1e-3 on another machine; fp16 and bf16 within their rounding, see ``TOLERANCE``).
"""

import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from recipes import catalogue
from recipes.config import ConfigError, load_config
from recipes.settings import Precision

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/assets/golden_losses.json"
PRECISIONS = [each.value for each in Precision]
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}  # relative, over three steps
QUICK: dict[str, list[str]] = {}
WITHOUT_CPU: set[str] = set()
FINAL = {  # what the run must reach, and how far fp16 and bf16 may be from fp32
    "typical_training": ("test_accuracy", 0.92, 0.03),
    "clipping": ("test_accuracy", 0.90, 0.04),
    "accumulation": ("test_accuracy", 0.92, 0.03),
    "gradient_penalty": ("test_accuracy", 0.90, 0.04),
    "wgan_gp": ("samples read as the digit asked for", 0.6, 0.2),
}
ON_CPU = [name for name in catalogue.NAMES if name not in WITHOUT_CPU]

pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.fixture
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def config_of(name, precision, *overrides):
    return load_config(
        catalogue.load(name).Config,
        ROOT / f"configs/{name}/{precision}.yaml",
        [*QUICK.get(name, []), *overrides],
    )


def first_losses(name, precision):
    return catalogue.load(name).train(config_of(name, precision, "steps=3")).losses


# -- configs ------------------------------------------------------------------------------------


def test_there_are_configs_of_recipes_alone():
    folders = {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()} - {"accelerate"}
    assert folders == set(catalogue.NAMES)
    assert set(FINAL) == set(ON_CPU)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", catalogue.NAMES)
def test_a_config_sets_every_key_to_its_default_and_explains_it(name, precision):
    schema = catalogue.load(name).Config
    path = ROOT / f"configs/{name}/{precision}.yaml"
    assert load_config(schema, path) == schema(precision=Precision[precision])
    text = path.read_text()
    for field in fields(schema):
        line = re.search(rf"^{field.name}:.*# (.+)$", text, re.MULTILINE)
        assert line, f"{field.name} is missing or has no comment"
        if field.default is not MISSING and field.name != "precision":
            kind, default = re.match(r"(.+), default ([^:]+)", line[1]).groups()
            assert field.type in {kind, kind.title().replace(" ", "")} or "|" in kind
            assert default in {
                str(field.default),
                str(field.default).lower(),
                getattr(field.default, "value", ""),
            }


def test_a_wrong_key_is_named_with_the_nearest_right_one():
    with pytest.raises(ConfigError, match=r"unknown key 'max_nrom'; allowed are .*did you mean max_norm\?"):
        config_of("clipping", "fp16", "max_nrom=1")
    with pytest.raises(ConfigError, match="steps must be int: .*many"):
        config_of("clipping", "fp16", "steps=many")


# -- first steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ON_CPU)
def test_the_first_losses_are_the_golden_ones(name, precision):
    golden = json.loads(GOLDEN.read_text())[name][precision]
    assert first_losses(name, precision) == pytest.approx(golden, rel=TOLERANCE[precision])


# -- whole runs ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_a_whole_run_ends_well_and_the_precisions_agree(name, tmp_path):
    key, floor, tolerance = FINAL[name]
    reached = {}
    for precision in PRECISIONS:
        record = catalogue.load(name).train(config_of(name, precision))
        assert bool(record.loss_scales) == (precision == "fp16")
        assert len(record.skipped) < len(record.losses) / 10
        numbers = record.as_dict()
        reached[precision] = numbers[key] if key in numbers else numbers["results"][key]
    assert min(reached.values()) >= floor, reached
    assert reached["fp16"] == pytest.approx(reached["fp32"], abs=tolerance)
    assert reached["bf16"] == pytest.approx(reached["fp32"], abs=tolerance)
    for path in record.save(tmp_path):
        assert path.stat().st_size > 500
    assert json.loads((tmp_path / "result.json").read_text())["losses"] == record.losses


# -- command line -------------------------------------------------------------------------------


def test_list_and_run_from_the_command_line(tmp_path):
    def call(*arguments):
        command = [sys.executable, "-m", "recipes", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = call("list")
    assert listed.returncode == 0, listed.stderr
    assert all(f"│ {name} " in listed.stdout for name in catalogue.NAMES)
    ran = call("run", "typical_training", "steps=2", f"output={tmp_path}", "precision=bf16")
    assert ran.returncode == 0, ran.stderr
    assert "arning" not in ran.stderr.replace("amp_plugin's native core", "")
    assert {path.name for path in (tmp_path / "typical_training_bf16").iterdir()} == {
        "result.json",
        "training.png",
    }


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no recipe 'cliping'; did you mean clipping\? .*typical_training"):
        catalogue.load("cliping")


def test_each_recipe_is_short_and_says_in_one_line_what_it_shows():
    for name in catalogue.NAMES:
        assert len((ROOT / f"recipes/{name}.py").read_text().splitlines()) <= 150
        assert 30 < len(catalogue.about(name)) <= 100


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for wanted in sys.argv[1:] or ON_CPU:
        known[wanted] = {precision: first_losses(wanted, precision) for precision in PRECISIONS}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
