"""Does a Hydra config with ``_target_`` build the Trainer that a program would build?"""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision
from tests.adapters.lightning_models import QUIET

pytestmark = [*QUIET, pytest.mark.native]

CONFIGS = Path(__file__).parents[2] / "configs" / "hydra"


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, _):
        hidden = nn.functional.gelu(self.body(batch))
        self.dtypes = hidden.dtype, self.head(hidden).dtype
        return self.head(hidden).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(*overrides: str) -> Trainer:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return instantiate(compose("trainer", list(overrides)).trainer)


def test_the_config_trains_as_it_says() -> None:
    built = trainer()
    model = Model()
    built.fit(model, DataLoader(torch.randn(8, 4), batch_size=2))
    plugin = built.precision_plugin
    assert isinstance(plugin, AmpPrecision)
    assert plugin.scaler.get_scale() == 1024.0
    assert model.dtypes == (torch.float32, torch.float32)


def test_options_are_overridden_on_the_command_line() -> None:
    plugin = trainer("trainer.plugins.0.precision=bf16").precision_plugin
    assert plugin.precision == "bf16-mixed"


def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(Exception, match="growth_intervall"):
        trainer("+trainer.plugins.0.growth_intervall=5")
