"""One-pass steps without a loss scale, in the frameworks: which steps use it, and what users see."""

import pytest
import torch
from lightning.pytorch import Callback

from amp_plugin import AmpPrecision
from tests.adapters.lightning_models import QUIET, Linear, fit, regression

pytestmark = [*QUIET, pytest.mark.native]
MAX_NORM = 0.01


class After(Callback):
    """A callback that records weights and optimizer states after each step."""

    def __init__(self):
        self.results, self.norms = [], []

    def on_train_batch_end(self, trainer, module, *_):
        optimizer = trainer.optimizers[0]
        self.results.append(trainer.precision_plugin.last_step(optimizer))
        self.norms.append(torch.cat([param.grad.flatten() for param in module.parameters()]).norm().item())


def trained(plugin, module=None, callbacks=()):
    after, module = After(), module or Linear()
    options = {"gradient_clip_val": MAX_NORM, "callbacks": [after, *callbacks]}
    fit(module, plugin, steps=4, data=regression(8), **options)
    return module, after


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_trainer_leaves_a_clip_to_the_step(precision):
    module, after = trained(AmpPrecision(precision))
    by_torch, seen = trained(AmpPrecision(precision, one_pass=False))
    assert [result.one_pass for result in after.results[1:]] == [True] * 3
    assert not any(result.one_pass for result in seen.results)
    for norms in (after.norms, seen.norms):
        assert all(norm == pytest.approx(MAX_NORM, rel=1e-3) for norm in norms)
    for mine, theirs in zip(module.parameters(), by_torch.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(after.results, seen.results, strict=True):
        torch.testing.assert_close(mine.norm, theirs.norm, rtol=1e-3, atol=0)
