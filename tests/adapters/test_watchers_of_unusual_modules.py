"""AmpMonitor and a page neither end nor change a run of modules that are rare: sparse, lazy, with an iterator."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision
from tests.adapters.lightning_models import QUIET, fit

RARE = ("Lazy modules", ".*infer the `batch_size`", ".*`dataloader_iter`")
pytestmark = [*QUIET, *(pytest.mark.filterwarnings(f"ignore:{message}") for message in RARE)]


class Net(LightningModule):
    """Return the loss of a look-up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = self.tables(), self.heads()

    def tables(self):
        return nn.Embedding(10, 4)

    def heads(self):
        return nn.Linear(4, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        return self.head(self.table(batch)).float().square().mean()


class Sparse(Net):
    """The gradient of the table is sparse."""

    def tables(self):
        return nn.Embedding(10, 4, sparse=True)


class Lazy(Net):
    """The head has no weights before the first batch."""

    def heads(self):
        return nn.LazyLinear(1)


class FromIterator(Net):
    """The step takes the iterator of the loader itself."""

    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [Sparse, Lazy, FromIterator])
def test_the_run_is_as_without_them(kind, precision, tmp_path):
    found = []
    for watched in (False, True):
        module = kind()
        fit(
            module,
            AmpPrecision(precision),
            steps=3,
            data=DataLoader(torch.arange(8), batch_size=2),
            callbacks=[AmpMonitor(report=tmp_path / "run.html")] if watched else [],
        )
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert (tmp_path / "run.html").exists()
