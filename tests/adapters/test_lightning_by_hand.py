"""Schedulers stepped by hand, and warnings at the user's line."""

import pytest
import torch

from amp_plugin import AmpMonitor, AmpPrecision, precision
from tests.adapters.lightning_models import QUIET, OneWeight, fit

pytestmark = QUIET


class ByHand(OneWeight):
    """Manual optimization whose first step overflows; steps its scheduler after each."""

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


@pytest.mark.parametrize("fused", [False, True])
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


def test_warnings_show_the_users_line(monkeypatch, recwarn):
    monkeypatch.setattr(precision, "cpu_capabilities", lambda: {"avx2": True})
    plugin = AmpPrecision("fp16", init_scale=1.5)
    fit(OneWeight(overflow_at=range(60)), plugin, steps=51, callbacks=[AmpMonitor(max_skips_in_a_row=60)])
    expected = (
        "fp16 is not fast on this cpu, expect",
        "50 steps of SGD in a row",
        "has ended",
    )
    texts = dict.fromkeys(expected, 0)
    for warning in recwarn:
        for text in texts:
            if text in str(warning.message):
                texts[text] += 1
                assert warning.filename.endswith("lightning_models.py"), warning  # where fit is called
    assert set(texts.values()) == {1}, texts
