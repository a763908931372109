"""Steps in one pass under the frameworks, where nothing is scaled: what is folded, and what users see."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback

from amp_plugin import AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import Weights, ours
from tests.adapters.lightning_models import QUIET, Linear, fit, regression

pytestmark = [*QUIET, pytest.mark.native]
MAX_NORM = 0.01


class After(Callback):
    """Keeps what there is after each step."""

    def __init__(self):
        self.results, self.norms = [], []

    def on_train_batch_end(self, trainer, module, *_):
        optimizer = trainer.optimizers[0]
        self.results.append(trainer.precision_plugin.last_step(optimizer))
        self.norms.append(torch.cat([param.grad.flatten() for param in module.parameters()]).norm().item())


class Looking(Callback):
    """Looks at gradients before the step."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        assert optimizer is not None


class Keeping(Linear):
    """Says itself when gradients are cleared."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()


def trained(plugin, module=None, callbacks=(), steps=4, **options):
    after = After()
    torch.manual_seed(0)
    module = module or Linear()
    callbacks = [after, *callbacks]
    fit(
        module,
        plugin,
        steps=steps,
        data=regression(8),
        gradient_clip_val=MAX_NORM,
        callbacks=callbacks,
        **options,
    )
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


@pytest.mark.parametrize(
    ("module", "callbacks"), [(None, [Looking()]), (Keeping, [])], ids=["a hook looks", "clears by itself"]
)
def test_the_trainer_writes_a_clip_where_somebody_may_see_it(module, callbacks):
    _, after = trained(AmpPrecision("bf16"), module and module(), callbacks)
    assert all(result.one_pass for result in after.results[1:])
    assert all(norm == pytest.approx(MAX_NORM, rel=1e-3) for norm in after.norms)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fabric_folds_on_request(precision):
    plugin = FabricAmpPrecision(precision, **({"init_scale": 2.0**8} if precision == "fp16" else {}))
    fabric = Fabric(plugins=[plugin], accelerator="cpu")
    torch.manual_seed(0)
    model, optimizer = fabric.setup(net := torch.nn.Linear(4, 1), torch.optim.AdamW(net.parameters()))
    for taken in (False, True):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 4)).square().sum())
        before = net.weight.grad.clone()
        norm = plugin.clip_grad_norm_(optimizer, MAX_NORM, fold=True)
        assert norm > MAX_NORM
        assert torch.equal(net.weight.grad, before)
        optimizer.step()
        assert plugin.last_step(optimizer).one_pass is taken
        grads = torch.cat([param.grad.flatten() for param in net.parameters()])
        assert grads.norm().item() == pytest.approx(MAX_NORM, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("fold", [False, True])
def test_accelerate_folds_on_request(precision, fold):
    accelerator = ours(precision=precision, fold_clip=fold)
    model = Weights()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(3.0 + step))
        before = model.weight.grad.clone()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.item() == pytest.approx(2 * (3.0 + step), rel=1e-3)
        assert torch.equal(model.weight.grad, before) is fold
        optimizer.step()
        assert accelerator.last_step(optimizer).one_pass
        assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
