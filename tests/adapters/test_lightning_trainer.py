"""AmpPrecision in the Trainer: regions, accumulation, clipping, schedulers, checkpoints, errors."""

import copy
import importlib
import inspect
import pickle
import sys
from functools import partialmethod

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import amp_plugin
from amp_plugin.adapters.lightning import AmpPrecision, FabricAmpPrecision, classes_for
from amp_plugin.adapters.scaler import scaler_groups
from tests.adapters.lightning_models import (
    QUIET,
    Linear,
    OneWeight,
    TwoOptimizers,
    batches,
    fit,
    make_trainer,
    regression,
    stock,
)
from tests.scaling.ops_seen import OpsSeen

pytestmark = QUIET


# -- scope and order ----------------------------------------------------------------------------


class Hooks(Callback):
    """A callback that records its own hooks and the module's, in order."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in {
            "on_exception",
            "on_save_checkpoint",
            "on_load_checkpoint",
        }:
            return lambda *_: self.calls.append(f"callback.{name}")
        return super().__getattribute__(name)


def noting(calls):
    """Return a module that records which methods Lightning calls around a step."""

    def method(name):
        def call(self, *args, **kwargs):
            calls.append(name)
            result = getattr(OneWeight, name)(self, *args, **kwargs)
            calls.append(f"{name} is over")
            return result

        return call

    names = (
        "training_step", "backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
        "configure_gradient_clipping", "optimizer_step", "on_before_zero_grad",
    )  # fmt: skip
    return type("Noting", (OneWeight,), {name: method(name) for name in names})()


def test_hook_order_is_that_of_the_stock_plugin():
    orders = []
    for plugin in (stock(), AmpPrecision("fp16"), AmpPrecision("bf16"), MixedPrecision("bf16-mixed", "cpu")):
        hooks = Hooks()
        options = {"callbacks": [hooks], "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
        fit(noting(hooks.calls), plugin, steps=2, **options)
        orders.append(hooks.calls)
    assert "callback.on_before_optimizer_step" in orders[0]
    assert len(orders[0]) > 50
    assert orders[1] == orders[0]
    assert orders[2] == orders[3]


class Dtypes(Linear):
    """Records the dtype of the batch, and of a matrix product in each kind of step."""

    def __init__(self):
        super().__init__(torch.optim.SGD)
        self.dtypes = {}

    def step(self, name, batch):
        self.dtypes[name], self.dtypes["batch"] = self.net(torch.ones(1, 8)).dtype, batch.dtype
        return self.net(torch.ones(1, 8)).float().sum()

    training_step = partialmethod(step, "train")
    validation_step = partialmethod(step, "validate")
    test_step = partialmethod(step, "test")
    predict_step = partialmethod(step, "predict")

    def on_train_batch_end(self, *_):
        self.dtypes["hook"] = self.net(torch.ones(1, 8)).dtype


HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("training", "evaluation", "trained", "evaluated"),
    [
        ("fp16", None, HALF, HALF),
        ("bf16", None, BF16, BF16),
        ("fp32", None, SINGLE, SINGLE),
        ("fp16", "fp32", HALF, SINGLE),
        ("fp32", "bf16", SINGLE, BF16),
    ],
)
def test_each_kind_of_step_has_its_precision(training, evaluation, trained, evaluated):
    module, data = Dtypes(), batches(1, torch.ones(2, dtype=torch.float64))
    trainer = make_trainer(AmpPrecision(training, eval_precision=evaluation))
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    assert module.dtypes.pop("batch") is torch.float64
    evaluations = dict.fromkeys(("validate", "test", "predict"), evaluated)
    assert module.dtypes == {"train": trained, "hook": SINGLE, **evaluations}


@pytest.mark.native
def test_rules_hold_for_the_whole_run(tmp_path):
    """They apply in the plugin's regions, in torch.autocast blocks inside them, and elsewhere in the run."""
    rules = amp_plugin.OpRules.default("cpu").with_rule("aten::linear", "fp32")
    path = tmp_path / "rules.yaml"
    path.write_text(rules.to_yaml())
    seen = []

    class Module(OneWeight):
        def training_step(self, batch, batch_idx):
            x = torch.ones(2, 2)
            seen.append(nn.functional.linear(x, x).dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append(nn.functional.linear(x, x).dtype)
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append(nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    for given in (rules, str(path)):
        seen.clear()
        fit(Module(), AmpPrecision("bf16", rules=given))
        assert seen == [torch.float32] * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):  # after the run the rules no longer apply
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


# -- windows and steps --------------------------------------------------------------------------


def test_a_window_is_one_step_with_a_result(precision):
    module, plugin = OneWeight(overflow_at=(1,)), AmpPrecision(precision, init_scale=8.0)
    (optimizer,) = fit(module, plugin, steps=3, accumulate_grad_batches=2).optimizers
    assert module.w.item() == 1.0 - 2 * 3.0
    assert (plugin.skipped_steps, plugin.optimizer_steps) == (1, 2)
    result, scale = plugin.last_step(optimizer), 4.0 if precision == "fp16" else 1.0
    assert (result.skipped, result.scale_before, result.scale_after) == (False, scale, scale)
    assert result.norm.item() == 3.0
    copy.deepcopy(plugin), pickle.dumps(plugin)


def test_a_step_whose_closure_raises_is_no_step(precision):
    class Interrupted(Linear):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("batch")
            return super().training_step(batch, batch_idx)

    plugin = AmpPrecision(precision, init_scale=1024.0)
    with pytest.raises(KeyError, match="batch"):
        fit(Interrupted(), plugin, steps=4, data=regression(4))
    assert plugin.optimizer_steps == 2


@pytest.mark.parametrize("window", [1, 2])
def test_a_weight_used_several_times_in_a_step_has_the_stock_gradient(window):
    """The gradients of its uses are added in fp32.

    If all uses shared one cast, they would be added in bf16.
    """

    class Recurrent(Linear):
        def training_step(self, batch, batch_idx):
            outputs = [self.net(part) for part in batch[0].split(1)]
            return torch.stack(outputs).float().square().mean()

        def on_after_backward(self):
            self.gradients = [param.grad.clone() for param in self.net.parameters()]

    def gradients(plugin):
        module = Recurrent()
        fit(module, plugin, steps=1, data=regression(2), accumulate_grad_batches=window)
        return module.gradients

    class Uncached(MixedPrecision):
        """The stock plugin as in Lightning 2.6, which does not share casts.

        The next release does (Lightning-AI #21616).
        """

        def forward_context(self):
            return self.autocast_context_manager()

    stock_plugin = Uncached("bf16-mixed", "cpu")
    for ours, theirs in zip(gradients(AmpPrecision("bf16")), gradients(stock_plugin), strict=True):
        assert torch.equal(ours, theirs)


# -- several optimizers -------------------------------------------------------------------------


class EditsGradients(OneWeight):
    """LBFGS that changes its gradient of 3 to 0.5.

    Its first step is the gradient, or 1 if the gradient is larger.
    """

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=1)


class ClipsByItself(EditsGradients):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)


class EditsInHook(EditsGradients):
    def on_before_optimizer_step(self, optimizer):
        self.w.grad.clamp_(max=0.5)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("module", [EditsGradients, ClipsByItself, EditsInHook])
def test_unscaled_gradients_of_a_repeated_closure_may_be_edited(module, precision):
    clip = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"} if module is EditsGradients else {}
    fitted = module()
    fit(fitted, AmpPrecision(precision, init_scale=8.0), **clip)
    assert fitted.w.item() == 0.5


def overflowing(where, fused):
    """Return a module whose method makes a gradient infinite without changing its version counter."""

    def clip_and_overflow(self, optimizer, *_, **__):
        LightningModule.clip_gradients(self, optimizer, 0.5, "norm")
        self.w.grad.data.mul_(torch.inf)

    return type("Overflows", (OneWeight,), {where: clip_and_overflow})(fused=fused)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "where", ["on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients"]
)
def test_gradients_are_read_again_after_user_code(where, clip, fused):
    module = overflowing(where, fused)
    trainer = fit(module, AmpPrecision(init_scale=8.0), gradient_clip_val=clip)
    assert (trainer.precision_plugin.skipped_steps, module.w.item()) == (1, 1.0)


def test_gradients_are_read_once_where_no_user_code_runs(fused):
    with OpsSeen() as seen:
        fit(OneWeight(fused=fused), AmpPrecision(init_scale=8.0), gradient_clip_val=0.5)
    assert len([name for name in seen.names if name in {"norm_check", "unscale_"}]) == 1


def toggled(module, batch, batch_idx):
    for optimizer in module.optimizers():
        with optimizer.toggle_model():
            optimizer.zero_grad()
            module.manual_backward(batch * (module.a + module.b))
            optimizer.step()


def several_losses(module, batch, batch_idx):
    first, second = module.optimizers()
    module.manual_backward(batch * module.a, retain_graph=True)
    module.manual_backward(2 * batch * (module.a + module.b))
    first.step()
    second.step()


@pytest.mark.parametrize(
    ("step", "steps", "taken"),
    [(toggled, 4, (6, 6)), (several_losses, 2, (9, 6))],
)
def test_steps_by_hand_while_the_scale_grows(step, steps, taken):
    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision(init_scale=4.0, growth_interval=1), steps=steps)
    assert (1.0 - module.a.item(), 1.0 - module.b.item()) == taken


def test_the_end_of_a_manual_training_step_ends_the_iteration():
    """The scale changes there.

    ``b`` keeps its gradients without using them, so they are converted to the new scale.
    """
    scales = []

    class Scales(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            scales.append((trainer.scaler.get_scale(), module.b.grad.item()))

    def step(module, batch, batch_idx):
        first, _ = module.optimizers()
        first.zero_grad()
        module.manual_backward(batch * (module.a + module.b))
        first.step()
        # unchanged until the training step ends, because b has not stepped
        assert module.trainer.scaler._scale.item() == 2.0 ** (batch_idx + 1)

    plugin = AmpPrecision(init_scale=2.0, growth_interval=1)
    fit(TwoOptimizers(step=step), plugin, steps=2, callbacks=[Scales()])
    assert scales == [(4.0, 3.0 * 4.0), (8.0, 6.0 * 8.0)]


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_manual_step_returns_what_its_closure_does(precision, overflow):
    returned = []

    def step(module, batch, batch_idx):
        optimizer, _ = module.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = batch * (module.a * torch.inf if overflow and not batch_idx else module.a)
            module.manual_backward(loss)
            return loss

        returned.append(optimizer.step(closure=closure).item())

    fit(TwoOptimizers(step=step), AmpPrecision(precision, init_scale=4.0), steps=2)
    first = torch.inf if overflow else 3.0
    assert returned == [first, 3.0 * (1.0 if overflow else 1.0 - 3.0)]


def test_lazy_parameters():
    class Lazy(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.LazyLinear(1, bias=False)

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(self.net(batch.reshape(1, 1)).sum())
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def run(plugin):
        torch.manual_seed(0)
        module = Lazy()
        fit(module, plugin, steps=2)
        return module.net.weight.item()

    assert run(AmpPrecision(init_scale=8.0)) == run(stock(8.0))


def alone(module, first, second, loss):
    (loss / 2).backward()
    first.step()


def set_by_hand(module, first, second, loss):
    module.a.grad = torch.tensor(3.0)
    first.step()


def before(module, first, second, loss):
    (loss / 2).backward(retain_graph=True)
    module.manual_backward(loss)
    second.step()


def after(module, first, second, loss):
    module.manual_backward(loss)
    (module.b * 3).backward()
    first.step()
    second.step()


@pytest.mark.parametrize("wrong", [alone, set_by_hand, before, after])
def test_gradients_that_manual_backward_has_not_made_are_named(wrong):
    """Otherwise they would be divided by a scale although they were never multiplied by it."""

    def step(module, batch, batch_idx):
        wrong(module, *module.optimizers(), batch * (module.a + module.b))

    with pytest.raises(
        RuntimeError, match=r"1 parameters \([ab]\) have .*self\.manual_backward\(loss\) instead of"
    ):
        fit(TwoOptimizers(step=step), AmpPrecision())
    fit(TwoOptimizers(step=step), AmpPrecision("bf16"))


def test_a_backward_whose_gradients_are_dropped_is_allowed():
    """Adversarial training does this: it discards the gradients of the weights."""

    def step(module, batch, batch_idx):
        first, _ = module.optimizers()
        x = batch.clone().requires_grad_()
        (x * module.a).backward()
        first.zero_grad()
        module.manual_backward((batch + x.grad.sign()) * module.a)
        first.step()

    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision())
    assert module.a.item() == 1.0 - 4.0


def test_watching_for_loss_backward_ends_with_the_run():
    def step(module, batch, batch_idx):
        first, _ = module.optimizers()
        copy.deepcopy(module.a), pickle.dumps(module.a)
        module.manual_backward(batch * module.a)
        assert module.a._post_accumulate_grad_hooks
        first.step()

    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision())
    assert not module.a._post_accumulate_grad_hooks
    module = OneWeight()
    fit(module, AmpPrecision())  # automatic optimization needs no hooks
    assert not module.w._post_accumulate_grad_hooks


# -- schedulers ---------------------------------------------------------------------------------


def test_a_scheduler_of_another_frequency_is_held_on_its_turn():
    def every_second(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"scheduler": scheduler, "frequency": 2}

    module = OneWeight(overflow_at=(1, 4), scheduler=every_second)
    fit(module, AmpPrecision(), steps=6)
    assert module.lrs == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("bf16", "fp16", "written in another precision; the scale stays at 8"),
        ("fp16", "bf16", "written in another precision; its scale is ignored"),
        ("fp16", "fp32", "written in another precision; its scale is ignored"),
    ],
)
def test_another_precision_warns_and_goes_on(tmp_path, before, after, message):
    fit(OneWeight(), AmpPrecision(before)).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=message):
        trainer = fit(
            OneWeight(), AmpPrecision(after, init_scale=8.0), steps=2, ckpt_path=tmp_path / "a.ckpt"
        )
    assert trainer.global_step == 2
    module = OneWeight()
    module.test_step = module.training_step
    make_trainer(AmpPrecision(after)).test(module, batches(1), tmp_path / "a.ckpt", verbose=False)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "16-mixd"}, r"precision='16-mixd' is unknown; .*did you mean precision='fp16'\?"),
        ({"precision": torch.float64}, r"precision=torch.float64 is not mixed precision.*'64-true'"),
        ({"eval_precision": "bf16-true"}, r"weights themselves in 16 bits.*Use eval_precision='bf16'"),
        ({"fp32_modules": "LayerNorm"}, "fp32_modules='LayerNorm' is not allowed; give a list"),
        ({"rules": "nofile.yaml"}, r"rules='nofile.yaml': .*No such file.*; give an OpRules or the path"),
        ({"rules": {"aten::mm": "fp32"}}, r"rules=\{'aten::mm': 'fp32'\}: .*; give an OpRules or the path"),
    ],
)
@pytest.mark.parametrize(
    "cls", [AmpPrecision, FabricAmpPrecision, classes_for("pytorch_lightning").AmpPrecision]
)
def test_wrong_options(cls, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cls(**given)
    with pytest.raises(TypeError, match="too many positional arguments.*allowed are precis"):
        cls("fp16", "cuda")


@pytest.mark.parametrize("name", ["AmpPrecision", "FabricAmpPrecision", "AmpMonitor"])
def test_both_packages_document_the_same_options(name):
    ours, theirs = (getattr(classes_for(package), name) for package in ("lightning", "pytorch_lightning"))
    assert inspect.signature(ours) == inspect.signature(theirs)
    names = theirs.__doc__.replace("pytorch_lightning", "lightning.pytorch")
    assert names.replace("lightning_fabric", "lightning.fabric") == ours.__doc__
    assert all(f"{option}: " in AmpPrecision.__doc__ for option in inspect.signature(AmpPrecision).parameters)
    for cls in (ours, theirs):
        assert cls.__name__ == cls.__qualname__ == name
        assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_ranks_without_shards_do_not_add_up_their_norms(strategy):
    root = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    vars(root).update(process_group="group", sharding_strategy=strategy)
    whole = strategy is ShardingStrategy.NO_SHARD
    assert scaler_groups(nn.Linear(1, 1), root) == {
        "process_groups": ("group",) if whole else (),
        "sharded_groups": () if whole else ("group",),
    }
    assert scaler_groups(nn.Linear(1, 1)) == {}


@pytest.mark.parametrize("kind", [AmpPrecision, FabricAmpPrecision])
def test_another_device_than_the_strategys_is_refused(kind):
    def start(device):
        plugin = kind("fp32", device=device)
        if kind is FabricAmpPrecision:
            Fabric(accelerator="cpu", devices=1, plugins=[plugin]).setup(nn.Linear(1, 1))
        else:
            fit(OneWeight(), plugin)

    start("cpu")
    with pytest.raises(ValueError, match="device='cuda' was given, but .* on 'cpu'; delete device="):
        start("cuda")


@pytest.mark.parametrize(
    ("package", "plugin", "options", "text"),
    [
        (
            "lightning",
            FabricAmpPrecision,
            {},
            r"FabricAmpPrecision\('fp16'\) of lightning.fabric .*The Trainer takes AmpPrecision.*classes_for",
        ),
        (
            "lightning",
            AmpPrecision,
            {"precision": "16-mixed"},
            r"delete precision=\.\.\. and keep this.*amp-plugin run",
        ),
        ("pytorch_lightning", AmpPrecision, {}, r"of lightning.pytorch .*has plugins for other packages"),
    ],
)
def test_a_plugin_of_the_wrong_kind_or_package_says_so(package, plugin, options, text):
    """A library such as neuralforecast may use one of the two Lightning packages, and the program the other."""
    trainer = classes_for(package).AmpPrecision.package.Trainer
    with pytest.raises(Exception, match=text):
        trainer(plugins=[plugin()], accelerator="cpu", logger=False, **options)


# -- two packages -------------------------------------------------------------------------------


def test_pytorch_lightning_has_classes_of_its_own():
    ours = classes_for("pytorch_lightning")
    pytorch_lightning = importlib.import_module("pytorch_lightning")
    assert issubclass(ours.AmpPrecision, pytorch_lightning.plugins.MixedPrecision)
    assert not issubclass(ours.AmpPrecision, Precision)

    trainer = pytorch_lightning.Trainer(
        plugins=[ours.AmpPrecision(init_scale=8.0)], callbacks=[ours.AmpMonitor()], accelerator="cpu", max_steps=2,
        logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    boring = importlib.import_module("pytorch_lightning.demos.boring_classes").BoringModel()
    trainer.fit(boring, boring.train_dataloader())
    assert trainer.callback_metrics["loss_scale"] == 8.0


def test_the_package_is_that_of_the_program(monkeypatch):
    import amp_plugin.adapters.lightning as adapter

    assert adapter.AmpPrecision is classes_for("lightning").AmpPrecision
    ours = classes_for("pytorch_lightning").AmpPrecision
    monkeypatch.delitem(sys.modules, "lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys.modules["pytorch_lightning"])
    assert adapter.AmpPrecision is ours
    with pytest.raises(ValueError, match="package='keras' is unknown"):
        classes_for("keras")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "amp_plugin.adapters.lightning.for_pytorch_lightning")
    with pytest.raises(ImportError, match="pytorch_lightning is not installed; run: pip install"):
        classes_for("pytorch_lightning")
    assert classes_for("lightning.fabric") is classes_for("lightning")
    with pytest.raises(AttributeError, match="has no attribute 'Amp'"):
        adapter.Amp  # noqa: B018
