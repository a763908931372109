"""In fp16 with torch's anomaly detection, the error says that the loss scale alone may have caused the nan."""

import pytest
import torch
from torch import nn

import amp_plugin

pytestmark = [pytest.mark.native, pytest.mark.filterwarnings("ignore")]


def loss_of(model, x):
    return nn.functional.mse_loss(model(x), 30 * x.sum(1, keepdim=True))


def train_accelerate(model, x, precision):
    pytest.importorskip("accelerate")
    accelerator = amp_plugin.AmpAccelerator(cpu=True, mixed_precision=precision)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with accelerator.autocast():
        loss = loss_of(model, x)
    accelerator.backward(loss)
    optimizer.step()


def train_fabric(model, x, precision):
    fabric_of = pytest.importorskip("lightning.fabric")
    fabric = fabric_of.Fabric(
        accelerator="cpu", devices=1, plugins=[amp_plugin.FabricAmpPrecision(precision)]
    )
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    fabric.backward(loss_of(model, x))
    optimizer.step()


def train_trainer(model, x, precision):
    lightning = pytest.importorskip("lightning.pytorch")
    from tests.adapters.lightning_models import make_trainer

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    make_trainer(amp_plugin.AmpPrecision(precision), detect_anomaly=True).fit(Trained(), x[None])


DOORS = [train_accelerate, train_fabric, train_trainer]


def run(train, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    with torch.autograd.set_detect_anomaly(True):
        train(model, torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), precision)


@pytest.mark.parametrize("train", DOORS)
def test_the_error_names_the_loss_scale_and_diagnose(train):
    with pytest.raises(RuntimeError, match="returned nan values") as raised:
        run(train, "fp16")
    assert "The loss scale is 65536, and it may be the only reason" in str(raised.value)
    assert "`amp-plugin diagnose train.py`" in str(raised.value)


@pytest.mark.parametrize("train", DOORS)
def test_without_a_loss_scale_nothing_is_said_and_a_sound_run_goes_on(train):
    run(train, "bf16")
