import re
from functools import partial

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from recipes.config import ROOT, load_config
from recipes.shared import ConfigError, Precision
from recipes.train_digits_accelerate import DigitsConfig, train
from tests.adapters.commands import launch

RECIPE_CONFIG = ROOT / "configs" / "accelerate" / "digits.yaml"
LAUNCH_FILES = sorted({*RECIPE_CONFIG.parent.glob("*.yaml")} - {RECIPE_CONFIG})


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
@pytest.mark.parametrize(("precision", "accumulate"), [("fp16", 1), ("fp16", 2), ("bf16", 1)])
def test_losses_equal_the_lightning_recipe_step_for_step(precision, accumulate, monkeypatch):
    from recipes import train_digits

    # on the CPU, because a GPU does not guarantee equal bits
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    # Accelerate's clip writes into the gradients, so its fp16 steps are torch's own. Use such steps in
    # Lightning too.
    monkeypatch.setenv("AMP_PLUGIN_ONE_PASS", "off")
    monkeypatch.setattr(train_digits, "AmpPrecision", partial(train_digits.AmpPrecision, one_pass=False))
    options = {"epochs": 2, "accumulate": accumulate, "width": 4}
    lightning = train_digits.train(
        train_digits.DigitsConfig(precision=Precision(precision), accelerator="cpu", **options)
    )
    ours = train(DigitsConfig(precision=precision, **options))
    assert len(ours.losses) == 2 * -(-20 // accumulate)
    # Lightning reports the loss after its division by the number of micro-batches
    unit = ours.losses[0] / lightning.losses[0]
    assert unit in {1, accumulate}
    assert ours.losses == [loss * unit for loss in lightning.losses]
    assert ours.loss_scales == lightning.loss_scales
    assert ours.skipped == lightning.skipped
    assert ours.final_loss_scale == lightning.final_loss_scale
    for mine, theirs in zip(ours.accuracies, lightning.accuracies, strict=True):
        assert mine == pytest.approx(theirs)
    assert ours.test_accuracy == pytest.approx(lightning.test_accuracy)


def test_recipe_config_is_the_default_and_complete():
    config = load_config(DigitsConfig, RECIPE_CONFIG)
    assert config == DigitsConfig()
    with pytest.raises(ConfigError, match="did you mean epochs"):
        load_config(DigitsConfig, RECIPE_CONFIG, ["epoch=1"])


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_accelerate_parses_each_launch_file_which_says_how_to_use_it(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == ("fp16" if "fp16" in path.stem else "bf16")
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    checked, _, from_file = _validate_launch_command(arguments)
    assert from_file
    assert checked.mixed_precision == config.mixed_precision
    assert checked.use_cpu == path.stem.startswith("cpu")
    assert checked.num_processes == config.num_processes
    assert checked.use_fsdp == ("fsdp2" in path.stem)
    assert not checked.use_fsdp or checked.fsdp_version == 2
    lines = path.read_text().splitlines()
    assert any(f"launch --config_file configs/accelerate/{path.name} recipes/" in line for line in lines)
    for line in lines:  # each key is explained
        assert line.startswith("#") or line.endswith("_config:") or re.search(r":\s.*#\s\S", line), line


@pytest.mark.slow
@pytest.mark.dist
def test_launched_for_real_the_digits_are_learnt(tmp_path):
    words = [
        *("--config_file", str(ROOT / "configs" / "accelerate" / "cpu_bf16_2_processes.yaml")),
        *(str(ROOT / "recipes" / "train_digits_accelerate.py"), "epochs=12", "width=8", f"output={tmp_path}"),
    ]
    done = launch(words, {"COLUMNS": "100"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bf16 x 2" in done.stdout
    accuracy = re.search(r"test accuracy\s*│\s*([\d.]+)%", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) >= 96.0  # processors without AVX512 round differently and reach 96.67
    assert done.stdout.count("test accuracy") == 1  # only the main process reports
    assert (tmp_path / "digits_accelerate" / "training.png").stat().st_size > 10_000
