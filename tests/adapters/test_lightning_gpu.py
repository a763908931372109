"""AmpPrecision on a GPU: steps in one pass, skips that the host learns of later, and FSDP1."""

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
    """A fused and an unfused step give nearly the same weights.

    They round differently, and an fp16 activation can then round the other way. The allowed difference is
    what the precision itself changes: the distance between the weights trained in fp16 and in fp32.
    """

    def trained(precision, *, fused):
        module = Linear(fused=fused)
        plugin = AmpPrecision(precision, init_scale=1024.0)
        fit(module, plugin, steps=10, data=regression(), accelerator="gpu", gradient_clip_val=clip)
        return weights(module)

    step, folded = (trained("fp16", fused=fused) for fused in (False, True))
    distance = (step - trained("fp32", fused=False)).abs().max().item()
    assert 0 < distance < 1e-2  # one of ten steps moves a weight by about the learning rate, 1e-2
    torch.testing.assert_close(folded, step, rtol=0.0, atol=distance)


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
    options["use_distributed_sampler"] = False  # under FSDP, Lightning's sampler would select other batches
    plugin, strategy = AmpPrecision(precision, init_scale=1024.0), FSDPStrategy(use_orig_params=True)
    trainer = fit(module, plugin, data=regression(), strategy=strategy, **options)
    fit(alone, AmpPrecision("fp32"), data=regression(), **options)
    assert module.losses == pytest.approx(alone.losses, rel=0.05)
    assert (trainer.scaler is not None) is (precision == "fp16")
