"""AmpPrecision on a GPU: folded steps, skips the host learns of late, FSDP's first version."""

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from amp_plugin.adapters.lightning import AmpPrecision
from tests.adapters.lightning_models import QUIET, Linear, OneWeight, fit, regression

pytestmark = [*QUIET, pytest.mark.gpu]


def weights(module):
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_folded_step_is_the_step(clip):
    results = []
    for fused in (False, True):
        module = Linear(fused=fused)
        plugin = AmpPrecision(init_scale=1024.0)
        fit(module, plugin, steps=10, data=regression(), accelerator="gpu", gradient_clip_val=clip)
        results.append(weights(module))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_a_scheduler_ends_where_the_optimizer_does(exact):
    def count(optimizer):
        return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)}

    module = OneWeight(overflow_at=(1, 2, 6), scheduler=count, fused=True)
    trainer = fit(module, AmpPrecision(exact_schedulers=exact), steps=12, accelerator="gpu")
    assert trainer.precision_plugin.optimizer_steps == 9
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 9


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="needs NCCL")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_fsdp(precision):
    module, alone = Linear(), Linear()
    options = {"steps": 10, "accelerator": "gpu", "gradient_clip_val": 1.0}
    plugin, strategy = AmpPrecision(precision, init_scale=1024.0), FSDPStrategy(use_orig_params=True)
    trainer = fit(module, plugin, data=regression(), strategy=strategy, **options)
    fit(alone, AmpPrecision("fp32"), data=regression(), **options)
    assert module.losses == pytest.approx(alone.losses, rel=0.05)
    assert (trainer.scaler is not None) is (precision == "fp16")
