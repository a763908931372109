"""Does a run resume from checkpoints of release 0.3: of the scaler, the entry points and stored weights?

The file was written by release 0.3.0 with plain torch. ``nn.Linear(4, 2)`` was trained for four steps, and
the second step was skipped in fp16.
"""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin import AmpPrecision, GradScaler, autocast, restore_weights, store_weights
from tests.adapters.accelerate_pair import ours
from tests.adapters.lightning_models import QUIET, make_trainer

FILE = Path(__file__).parents[1] / "assets" / "checkpoints_0_3.pt"
pytestmark = QUIET


@pytest.fixture
def saved():
    return torch.load(FILE, weights_only=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loop_has_its_scales_and_its_count_of_skips(saved, enabled):
    scaler = GradScaler("cpu", losses=["aux"], hysteresis=2, enabled=enabled)
    scaler.load_state_dict(saved["loop"] if enabled else {})
    found = scaler.get_scale(), scaler.get_scale("aux"), scaler.skipped_steps()
    assert found == (tuple(saved["loop_scale"]) if enabled else (1.0, 1.0, 0))


def test_torchs_scaler_takes_the_same_state(saved):
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved["loop"])
    assert scaler.get_scale() == saved["loop_scale"][0]


def test_weights_in_16_bits_and_moments_in_8_are_those_that_were_saved(saved):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store_weights(model, optimizer, weights="bf16", state="8bit")
    model.load_state_dict(saved["stored"]["model"])
    optimizer.load_state_dict(saved["stored"]["optimizer"])
    for number, entry in optimizer.state_dict()["state"].items():
        before = saved["stored"]["optimizer"]["state"][number]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[moment]["8bit"], before[moment]["8bit"])
    with autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()  # reads the loaded moments
    model.load_state_dict(saved["stored"]["model"])
    restore_weights(model)
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, saved["stored_fp32"][name])


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.linspace(-1, 1, 32).reshape(8, 1, 4), batch_size=None)


class Beginning(Callback):
    def on_train_batch_start(self, trainer, module, *_):
        plugin = trainer.precision_plugin
        self.found = plugin.scaler.get_scale(), plugin.optimizer_steps, plugin.skipped_steps
        self.weight = module.net.weight.detach().clone()
        trainer.should_stop = True


def test_a_trainer_resumes(saved, tmp_path):
    torch.save(saved["lightning"], tmp_path / "run.ckpt")
    beginning = Beginning()
    trainer = make_trainer(AmpPrecision("fp16"), steps=6, callbacks=[beginning])
    trainer.fit(Module(), ckpt_path=tmp_path / "run.ckpt")
    assert beginning.found == tuple(saved["lightning_scale"])
    assert torch.equal(beginning.weight, saved["lightning"]["state_dict"]["net.weight"])


def test_an_accelerator_resumes(saved, tmp_path):
    accelerator = ours(init_scale=4.0)
    model = nn.Linear(4, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path)
    torch.save(saved["accelerate"], tmp_path / "scaler.pt")
    accelerator.load_state(tmp_path)
    assert accelerator.scaler.get_scale() == saved["accelerate_scale"]
    assert accelerator.scaler.skipped_steps() == 1
