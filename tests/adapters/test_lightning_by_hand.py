"""Learning rate schedulers that are stepped in the user's code."""

import pytest
import torch

from amp_plugin import AmpPrecision
from tests.adapters.lightning_models import QUIET, OneWeight, fit

pytestmark = QUIET


class ByHand(OneWeight):
    """Manual optimization: the first step overflows, and the scheduler is stepped after every step."""

    def __init__(self, step_scheduler, **options):
        super().__init__(overflow_at=(0, 2), lr=0.1, **options)
        self.automatic_optimization = False
        self.step_scheduler, self.stepped = step_scheduler, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.stepped.append(self.step_scheduler(self.trainer.precision_plugin, self.lr_schedulers()))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, fused=self.fused)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize(
    ("precision", "stepped"), [("fp16", [False, True, False, True]), ("bf16", None), ("fp32", None)]
)
def test_a_scheduler_is_held_back_by_hand(precision, stepped, fused):
    module = ByHand(lambda plugin, scheduler: plugin.step_scheduler(scheduler), fused=fused)
    if stepped is None:
        module.overflow_at = ()
    plugin = AmpPrecision(precision)
    fit(module, plugin, steps=4)
    assert module.stepped == (stepped or [True] * 4)
    taken = sum(module.stepped)
    assert module.lrs[-1] == pytest.approx(0.1 * 0.5**taken)
    assert plugin.optimizer_steps == taken


def test_a_metric_is_handed_on():
    module = ByHand(lambda plugin, scheduler: plugin.step_scheduler(scheduler, 1.0))
    module.configure_optimizers = lambda: (
        [optimizer := torch.optim.SGD(module.parameters(), lr=0.1)],
        [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)],
    )
    fit(module, AmpPrecision("fp16"), steps=4)
    assert module.stepped == [False, True, False, True]
    assert module.lrs[-1] == pytest.approx(0.01)
