"""AmpPrecision configured by a YAML file through LightningCLI."""

import sys

import pytest
import torch
import yaml

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

from lightning.pytorch.cli import LightningCLI

from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision
from amp_plugin.options import PluginOptions, option_names
from tests.adapters.lightning_models import QUIET, Linear, regression

# warnings about calls that LightningCLI makes
OUTDATED = "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
pytestmark = [*QUIET, pytest.mark.filterwarnings(OUTDATED)]

CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_model_summary: false
  enable_progress_bar: false
  plugins:
    - class_path: amp_plugin.adapters.lightning.AmpPrecision
      init_args:
        precision: {precision}
        eval_precision: fp32
        fp32_modules: [net.2]
        init_scale: 1024.0
        growth_interval: 1
  callbacks:
    - class_path: amp_plugin.adapters.lightning.AmpMonitor
      init_args:
        max_skips_in_a_row: 7
"""


class Module(Linear):
    def __init__(self):
        super().__init__()

    def train_dataloader(self):
        return regression()


def run(tmp_path, monkeypatch, precision, *arguments):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(precision=precision))
    monkeypatch.setattr(sys, "argv", ["program", "fit", "--config", str(path), *arguments])
    return LightningCLI(Module, save_config_callback=None, seed_everything_default=1).trainer


def test_all_options_come_from_yaml(tmp_path, monkeypatch):
    trainer = run(tmp_path, monkeypatch, "16-mixed")  # as LightningCLI's users write it
    plugin = trainer.precision_plugin
    assert isinstance(plugin, AmpPrecision)
    assert (plugin.settings.precision, plugin.settings.eval_precision) == ("fp16", "fp32")
    assert list(plugin.settings.fp32_modules) == ["net.2"]
    assert plugin.scaler.get_scale() == 4096.0
    monitor = next(callback for callback in trainer.callbacks if isinstance(callback, AmpMonitor))
    assert monitor.max_skips_in_a_row == 7
    assert torch.get_default_dtype() is torch.float32


def test_a_config_that_is_printed_makes_the_same_plugin(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, monkeypatch, "fp16", "--print_config")
    assert ended.value.code in {0, None}
    printed = capsys.readouterr().out
    options = yaml.safe_load(printed)["trainer"]["plugins"][0]["init_args"]
    assert set(options) == set(option_names(PluginOptions))
    assert (options["init_scale"], options["weights"]) == (1024.0, "fp32")
    (tmp_path / "printed.yaml").write_text(printed)
    monkeypatch.setattr(sys, "argv", ["program", "fit", "--config", str(tmp_path / "printed.yaml")])
    plugin = LightningCLI(Module, save_config_callback=None).trainer.precision_plugin
    assert (plugin.settings.init_scale, plugin.settings.eval_precision) == (1024.0, "fp32")
    assert list(plugin.settings.fp32_modules) == ["net.2"]


def test_a_wrong_precision_is_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, "fp12")
    assert "fp12" in capsys.readouterr().err
