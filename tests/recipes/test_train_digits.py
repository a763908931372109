"""The digits recipe: its config, its data, and runs in three precisions."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes import demo
from recipes.config import load_config
from recipes.shared import ConfigError, LossScaleConfig, Precision, TrainingRecord, digits_loaders
from recipes.train_digits import DigitsConfig, main, train
from tests import warm_processes
from tests.recipes.command_line import digits_as_script_and_as_module

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/train_digits.yaml"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*many workers.*"),
    pytest.mark.filterwarnings("ignore:.*fewer.*than the logging interval.*"),
]


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# -- config -------------------------------------------------------------------------------------


def test_overrides_replace_values_of_the_file():
    assert load_config(DigitsConfig, CONFIG) == DigitsConfig()
    config = load_config(DigitsConfig, CONFIG, ["epochs=3", "loss_scale.init_scale=8", "precision=bf16"])
    assert (config.epochs, config.precision) == (3, Precision.bf16)
    assert config.loss_scale == LossScaleConfig(init_scale=8.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epoch=3", r"unknown key 'epoch'; allowed are name, precision, .*; did you mean epochs\?"),
        ("loss_scale.init=3", r"unknown key 'loss_scale.init'; .*did you mean loss_scale.init_scale"),
        ("precision=fp8", r"precision must be one of fp16, bf16, fp32: .*fp8"),
        ("clip_norm=[1]", "clip_norm must be float"),
        ("loss_scale=3", "LossScaleConfig.*a section takes keys of its own"),
        ("epochs", r"override 'epochs' has no '='; write key=value"),
    ],
)
def test_a_wrong_override_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(DigitsConfig, CONFIG, [override])


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no.yaml does not exist; beside it there is .*train_digits\.yaml"):
        load_config(DigitsConfig, ROOT / "configs/no.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("precison: fp16\n")
    with pytest.raises(ConfigError, match=r"broken.yaml: unknown key 'precison'.*did you mean precision"):
        load_config(DigitsConfig, broken)
    broken.write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"broken.yaml is no YAML"):
        load_config(DigitsConfig, broken)


def test_an_accelerator_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "accelerator=gppu"])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = "train_digits.py: accelerator=gppu is not allowed here; use auto, cpu or gpu: "
    assert told in capsys.readouterr().err


# -- data and model -----------------------------------------------------------------------------


def test_the_order_of_the_data_depends_on_the_seed_alone():
    def labels(seed):
        return torch.cat([labels for _, labels in digits_loaders(batch_size=64, seed=seed).train])

    assert torch.equal(labels(0), labels(0))
    assert not torch.equal(labels(0), labels(1))
    loaders = digits_loaders(batch_size=64, seed=0)
    sizes = [len(part.dataset) for part in (loaders.train, loaders.validation, loaders.test)]
    assert sizes == [1257, 180, 360]
    images, _ = next(iter(loaders.train))
    assert (images.shape, images.dtype) == ((64, 1, 8, 8), torch.float32)
    assert (images.min(), images.max()) == (0.0, 1.0)


# -- record -------------------------------------------------------------------------------------


def test_the_record_counts_taken_and_skipped_steps(capsys):
    record = TrainingRecord(title="run")
    for skipped, scale in ((False, 8.0), (True, 8.0), (False, 4.0)):
        record.add_step(loss=1.0, loss_scale=scale, skipped=skipped)
    record.final_loss_scale, record.test_accuracy = 4.0, 0.5
    record.add_accuracy(0.25)
    record.print_table()
    rows = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {key.strip(): value.strip() for key, value in rows}
    assert (table["optimizer steps taken"], table["optimizer steps skipped"]) == ("2", "1")
    assert (table["final loss scale"], table["test accuracy"]) == ("4", "50.00%")
    assert record.accuracies == [(3, 0.25)]


# -- runs ---------------------------------------------------------------------------------------


def short(precision, **changes):
    return replace(DigitsConfig(precision=Precision[precision], width=4, epochs=1, batch_size=256), **changes)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [("fp16", {}), ("fp16", {"batch_size": 128, "accumulate": 2}), ("bf16", {}), ("fp32", {})],
)
def test_one_epoch(precision, changes, tmp_path):
    record = train(short(precision, **changes))
    assert len(record.losses) == 5
    assert record.losses[-1] < record.losses[0]
    assert len(record.loss_scales) == (5 if precision == "fp16" else 0)
    assert len(record.accuracies) == 1
    record.save_plot(tmp_path / "new" / "training.png")
    assert (tmp_path / "new" / "training.png").stat().st_size > 10_000


@pytest.mark.whole_run
def test_three_precisions_agree():
    fp16, bf16, fp32 = (
        train(short(name, epochs=4, width=8, batch_size=32)).test_accuracy
        for name in ("fp16", "bf16", "fp32")
    )
    assert min(fp16, bf16, fp32) >= 0.95
    assert [fp16, bf16] == pytest.approx([fp32] * 2, abs=0.02)


@pytest.mark.whole_run
def test_the_program_runs_without_a_warning(tmp_path):
    words = ["epochs=1", "batch_size=256", "width=4", f"output={tmp_path}"]
    done = warm_processes.call(digits_as_script_and_as_module, words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 2
    lines = (done.stdout + done.stderr.replace("amp_plugin's native core", "")).splitlines()
    unexpected = [line for line in lines if "arning" in line and "fp16 is not fast on this cpu" not in line]
    assert not unexpected  # except for the warning of an older processor
    for name in ("script", "module"):
        assert (tmp_path / f"{name}_fp16/training.png").exists()


@pytest.mark.parametrize(
    ("cuda", "bf16", "precision"),
    [(True, False, "fp16"), (False, True, "bf16"), (False, False, "fp32"), (False, None, "fp32")],
)
def test_the_demo_trains_in_what_is_fast(cuda, bf16, precision, monkeypatch, capsys):
    """In fp16 the demo took 80 s on two cores: torch's fp16 convolutions are slow on any CPU."""
    given = []
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(demo, "is_fast", lambda *_: bf16)
    monkeypatch.setattr(demo.train_digits, "main", lambda: given.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["demo", "epochs=1"])
    demo.main()
    assert given == ["demo", f"precision={precision}", "epochs=1"]
    assert f"training in {precision}" in capsys.readouterr().out
