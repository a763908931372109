"""AmpPrecision in the Trainer: scope, windows, clipping, cadences, checkpoints, errors."""

import copy
import importlib
import inspect
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

import amp_plugin
from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision, FabricAmpPrecision, classes_for
from amp_plugin.adapters.lightning.callbacks_and_schedulers import HeldSchedulers
from amp_plugin.adapters.scaler import scaler_groups
from amp_plugin.scaling import GradScaler, OverflowReport, StepResult
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

FRAMEWORK_METHODS = [
    "convert_module", "convert_input", "convert_output", "tensor_init_context", "module_init_context",
    "forward_context", "train_step_context", "val_step_context", "test_step_context", "predict_step_context",
    "pre_backward", "backward", "post_backward", "optimizer_step", "connect", "clip_gradients",
    "clip_grad_by_norm", "clip_grad_by_value", "state_dict", "load_state_dict", "on_save_checkpoint",
    "on_load_checkpoint", "teardown",
]  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORK_METHODS)
def test_no_method_of_the_stock_amp_plugins_is_inherited(name):
    owner = next(kind for kind in AmpPrecision.__mro__ if name in vars(kind))
    assert owner.__module__.startswith("amp_plugin."), owner


# -- scope and order ----------------------------------------------------------------------------


class Hooks(Callback):
    """The hooks of one step, in order, and what the module's own say."""

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


class Told(OneWeight):
    """A module that reports its hooks."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        self.calls.append("backward")
        super().backward(loss)

    def on_before_backward(self, loss):
        self.calls.append("on_before_backward")

    def on_after_backward(self):
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.calls.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.calls.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args, **kwargs):
        self.calls.append("optimizer_step")
        super().optimizer_step(*args, **kwargs)
        self.calls.append("stepped")

    def on_before_zero_grad(self, optimizer):
        self.calls.append("on_before_zero_grad")


def test_hook_order_is_that_of_the_stock_plugin():
    orders = []
    for plugin in (stock(), AmpPrecision("fp16"), AmpPrecision("bf16"), MixedPrecision("bf16-mixed", "cpu")):
        hooks = Hooks()
        fit(
            Told(hooks.calls),
            plugin,
            steps=2,
            callbacks=[hooks],
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
        )
        orders.append(hooks.calls)
    assert "callback.on_before_optimizer_step" in orders[0]
    assert len(orders[0]) > 50
    assert orders[1] == orders[0]
    assert orders[2] == orders[3]


class Dtypes(LightningModule):
    """Notes the dtype of a matrix product in each kind of step."""

    def __init__(self):
        super().__init__()
        self.layer, self.dtypes = nn.Linear(2, 2), {}

    def _step(self, name):
        out = self.layer(torch.ones(1, 2))
        self.dtypes[name] = out.dtype
        loss = nn.functional.mse_loss(out, torch.ones(1, 2))
        assert loss.dtype is torch.float32
        return loss

    def training_step(self, batch):
        return self._step("train")

    def validation_step(self, batch):
        return self._step("validate")

    def test_step(self, batch):
        return self._step("test")

    def predict_step(self, batch):
        return self._step("predict")

    def on_train_batch_end(self, *_):
        self.dtypes["hook"] = self.layer(torch.ones(1, 2)).dtype

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("training", "evaluation", "expected"),
    [
        ("fp16", None, (torch.float16, torch.float16)),
        ("bf16", None, (torch.bfloat16, torch.bfloat16)),
        ("fp32", None, (torch.float32, torch.float32)),
        ("fp16", "fp32", (torch.float16, torch.float32)),
        ("fp32", "bf16", (torch.float32, torch.bfloat16)),
    ],
)
def test_each_kind_of_step_has_its_precision(training, evaluation, expected):
    module = Dtypes()
    trainer = make_trainer(AmpPrecision(training, eval_precision=evaluation))
    trainer.fit(module, batches(1), batches(1))
    trainer.validate(module, batches(1), verbose=False)
    trainer.test(module, batches(1), verbose=False)
    trainer.predict(module, batches(1))
    assert module.dtypes == {
        "train": expected[0],
        "validate": expected[1],
        "test": expected[1],
        "predict": expected[1],
        "hook": torch.float32,
    }


def test_batches_keep_their_dtypes():
    class Module(OneWeight):
        def training_step(self, batch, batch_idx):
            self.dtype_seen = batch.dtype
            return self.w * batch.float()

    module = Module()
    fit(module, AmpPrecision(), data=batches(1, torch.tensor(3.0, dtype=torch.float64)))
    assert module.dtype_seen is torch.float64


@pytest.mark.parametrize("wanted", ["net.2", "net.*", "Linear"])
def test_modules_in_fp32(wanted):
    seen = {}

    class Module(Linear):
        def training_step(self, batch, batch_idx):
            for name in ("net.0", "net.2"):
                self.get_submodule(name).register_forward_hook(
                    lambda _, args, out, name=name: seen.update({name: out.dtype})
                )
            return super().training_step(batch, batch_idx)

    fit(Module(), AmpPrecision("bf16", fp32_modules=[wanted]), data=regression())
    first = torch.bfloat16 if wanted == "net.2" else torch.float32
    assert seen == {"net.0": first, "net.2": torch.float32}


def test_a_module_that_is_not_there():
    with pytest.raises(ValueError, match="LayerNorm"):
        fit(Linear(), AmpPrecision(fp32_modules=["LayerNorm"]), data=regression())


@pytest.mark.native
def test_rules_hold_for_the_whole_run(tmp_path):
    """In the plugin's regions, in blocks of torch's own inside them, and elsewhere in the run."""
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
    with torch.autocast("cpu", dtype=torch.bfloat16):  # and not after it
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


# -- windows ------------------------------------------------------------------------------------


def test_one_update_a_window():
    module = OneWeight(overflow_at=(1,))
    trainer = fit(module, AmpPrecision(init_scale=8.0), steps=3, accumulate_grad_batches=2)
    assert trainer.scaler.get_scale() == 4.0  # one overflow in three windows
    assert module.w.item() == 1.0 - 2 * 3.0
    assert trainer.precision_plugin.optimizer_steps == 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
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
    """Its gradients add up in fp32; a cast shared by all uses would add them up in bf16."""

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
        """As in 2.6; the release after it shares casts again (Lightning-AI #21616)."""

        def forward_context(self):
            return self.autocast_context_manager()

    stock_plugin = Uncached("bf16-mixed", "cpu")
    for ours, theirs in zip(gradients(AmpPrecision("bf16")), gradients(stock_plugin), strict=True):
        assert torch.equal(ours, theirs)


# -- clipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_gradient_clip_val_clips_unscaled_gradients(precision, algorithm):
    module = OneWeight()
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    fit(module, AmpPrecision(precision), **options)
    assert module.w.item() == pytest.approx(0.5, rel=1e-5)


def test_an_overridden_configure_gradient_clipping_sees_unscaled_gradients():
    class Module(OneWeight):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.seen = self.w.grad.item()
            self.clip_gradients(optimizer, 1.0, "value")
            self.clip_gradients(optimizer, 0.5, "norm")

    for fused in (False, True):
        module = Module(fused=fused)
        fit(module, AmpPrecision())
        assert module.seen == 3.0
        assert module.w.item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_hooks_of_a_fused_optimizer_see_unscaled_gradients(clip):
    seen = []

    class Module(OneWeight):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda *_: seen.append(self.w.grad.item()))
            return optimizer

    fit(Module(fused=True), AmpPrecision(), gradient_clip_val=clip)
    assert seen == [pytest.approx(clip or 3.0, rel=1e-5)]


# -- several optimizers -------------------------------------------------------------------------


class EditsGradients(OneWeight):
    """LBFGS whose gradient of 3 becomes 0.5: its first step is the gradient, or 1 if that is larger."""

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


class Overflows(OneWeight):
    """Its gradient becomes infinite, unseen by torch's version counter."""

    def overflow(self):
        self.w.grad.data.mul_(torch.inf)


class OverflowsInHook(Overflows):
    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, 0.5, "norm")
        self.overflow()


class OverflowsWhereItConfiguresClipping(Overflows):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.5, "norm")
        self.overflow()


class OverflowsWhereItClips(Overflows):
    def clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        super().clip_gradients(optimizer, 0.5, "norm")
        self.overflow()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", Overflows.__subclasses__())
def test_gradients_are_read_again_after_user_code(kind, clip, fused):
    module = kind(fused=fused)
    trainer = fit(module, AmpPrecision(init_scale=8.0), gradient_clip_val=clip)
    assert trainer.precision_plugin.skipped_steps == 1
    assert module.w.item() == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_read_once_where_no_user_code_runs(fused):
    with OpsSeen() as seen:
        fit(OneWeight(fused=fused), AmpPrecision(init_scale=8.0), gradient_clip_val=0.5)
    assert len([name for name in seen.names if name in {"norm_check", "unscale_"}]) == 1


def test_n_critic_steps_one_optimizer_several_times_an_iteration():
    def step(module, batch, batch_idx):
        generator, critic = module.optimizers()
        for _ in range(3):
            critic.zero_grad()
            module.manual_backward(batch * module.b)
            critic.step()
        generator.zero_grad()
        module.manual_backward(batch * (module.a + module.b))
        generator.step()

    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision(init_scale=4.0, growth_interval=1), steps=8)
    assert (module.a.item(), module.b.item()) == (1.0 - 2 * 3.0, 1.0 - 2 * 9.0)


def test_the_end_of_a_manual_training_step_ends_the_iteration():
    """The scale changes there although ``b`` keeps gradients it never steps on; they are converted."""
    scales = []

    class Scales(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            scales.append((trainer.scaler.get_scale(), module.b.grad.item()))

    def step(module, batch, batch_idx):
        first, _ = module.optimizers()
        first.zero_grad()
        module.manual_backward(batch * (module.a + module.b))
        first.step()
        assert module.trainer.scaler.get_scale() == 2.0 ** (batch_idx + 1)  # waits for b until the end

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


def test_parameters_in_float16_are_refused_or_allowed():
    class Half(OneWeight):
        def configure_optimizers(self):  # after set-up, which would make it float32
            self.w = torch.nn.Parameter(self.w.data.half())
            return super().configure_optimizers()

    with pytest.raises(ValueError, match=r"'w' is float16: .*, or pass fp16_gradients=True and lose"):
        fit(Half(), AmpPrecision("fp16"))
    module = Half()
    with pytest.warns(
        UserWarning, match="1 parameters in 16 bits were frozen, or not made yet, when the model was"
    ):
        fit(module, AmpPrecision("fp16", fp16_gradients=True, init_scale=4.0))
    assert module.w.item() == 1.0 - 3.0


@pytest.mark.parametrize("manual", [False, True])
def test_lazy_parameters(manual):
    class Lazy(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual
            self.net = nn.LazyLinear(1, bias=False)

        def training_step(self, batch, batch_idx):
            loss = self.net(batch.reshape(1, 1)).sum()
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def run(plugin):
        torch.manual_seed(0)
        module = Lazy()
        fit(module, plugin, steps=2)
        return module.net.weight.item()

    assert run(AmpPrecision(init_scale=8.0)) == run(stock(8.0))


def test_toggled_optimizers():
    def step(module, batch, batch_idx):
        for optimizer in module.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                module.manual_backward(batch * (module.a + module.b))
                optimizer.step()

    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision(init_scale=4.0, growth_interval=1), steps=4)
    assert (module.a.item(), module.b.item()) == (-5.0, -5.0)


def test_several_losses_of_one_step():
    def step(module, batch, batch_idx):
        first, second = module.optimizers()
        module.manual_backward(batch * module.a, retain_graph=True)
        module.manual_backward(2 * batch * (module.a + module.b))
        first.step()
        second.step()

    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision(init_scale=4.0, growth_interval=1), steps=2)
    assert (module.a.item(), module.b.item()) == (1.0 - 9.0, 1.0 - 6.0)


@pytest.mark.parametrize("create_graph", [True, False])
def test_gradients_and_penalties_inside_training_step(create_graph):
    class Module(OneWeight):
        def training_step(self, batch, batch_idx):
            plugin = self.trainer.precision_plugin
            output = self.w**2 * batch
            (grad,) = plugin.grad(output, self.w, create_graph=create_graph, retain_graph=True)
            self.seen = grad.item()
            return output + (grad.square() if create_graph else 0.0)

    module = Module()
    fit(module, AmpPrecision(init_scale=1024.0))
    # d/dw (3 w^2) = 6 at w = 1, and of (6 w)^2: 72
    assert module.seen == 6.0
    assert module.w.item() == 1.0 - 6.0 - (72.0 if create_graph else 0.0)


WRITE_MANUAL_BACKWARD = r"write self\.manual_backward\(loss\) instead of loss\.backward\(\)"


def test_loss_backward_instead_of_manual_backward_is_named():
    def step(module, batch, batch_idx):
        optimizer, _ = module.optimizers()
        (batch * module.a).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=WRITE_MANUAL_BACKWARD):
        fit(TwoOptimizers(step=step), AmpPrecision())
    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision("bf16"))
    assert module.a.item() == -2.0


@pytest.mark.parametrize("order", ["own step first", "before manual_backward", "after manual_backward"])
def test_loss_backward_beside_manual_backward_is_named_too(order):
    """Else the gradient of ``b`` would be divided by a scale it was never multiplied with."""

    def step(module, batch, batch_idx):
        first, second = module.optimizers()
        if order == "before manual_backward":
            (batch * module.b).backward()
        module.manual_backward(batch * (module.a + module.b))
        if order == "own step first":
            first.step()
            second.zero_grad()
        if order != "before manual_backward":
            (batch * module.b).backward()
        first.step()
        second.step()

    with pytest.raises(RuntimeError, match=rf"1 parameters \(b\) have gradients.*{WRITE_MANUAL_BACKWARD}"):
        fit(TwoOptimizers(step=step), AmpPrecision())


def test_gradients_set_by_hand_without_a_backward_are_refused():
    def step(module, batch, batch_idx):
        module.a.grad = torch.tensor(3.0)
        module.optimizers()[0].step()

    with pytest.raises(RuntimeError, match=WRITE_MANUAL_BACKWARD):
        fit(TwoOptimizers(step=step), AmpPrecision())


def test_a_backward_whose_gradients_are_dropped_is_allowed():
    """As where inputs are attacked: the gradients of the weights are thrown away."""

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_second_step_on_the_same_gradients(fused, overflow):
    """Takes them for scaled ones, as the stock plugin does, or is skipped again."""

    class Module(OneWeight):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.w * batch * (torch.inf if overflow else 1.0))
            self.optimizers().step()
            self.optimizers().step()

    module = Module(fused=fused)
    trainer = fit(module, AmpPrecision(), steps=2)
    taken = 3.0 * (1.0 + 2.0**-16)
    assert module.w.item() == pytest.approx(1.0 if overflow else 1.0 - taken, abs=1e-6)
    assert trainer.precision_plugin.skipped_steps == 2 * overflow


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
    fit(module, AmpPrecision())  # nothing to watch in automatic optimization
    assert not module.w._post_accumulate_grad_hooks


# -- schedulers ---------------------------------------------------------------------------------


def test_a_scheduler_of_another_frequency_is_held_on_its_turn():
    def every_second(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"scheduler": scheduler, "frequency": 2}

    module = OneWeight(overflow_at=(1, 4), scheduler=every_second)
    fit(module, AmpPrecision(), steps=6)
    assert module.lrs == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_schedulers_are_held_for_as_many_steps_as_the_log_says():
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in optimizers]
    held, log = HeldSchedulers(), GradScaler("cpu").step_log
    configs = config, other = [LRSchedulerConfig(scheduler, interval="step") for scheduler in schedulers]
    held.take(configs, log)
    never = sys.maxsize
    for skipped in (True, False, True):
        result = StepResult.unscaled() if not skipped else skipped_result()
        log.add(optimizers[0], result)
        held.after_step(optimizers[0], log)
        assert (config.frequency, other.frequency) == (never if skipped else 1, 1)
    held.take([], log)  # as at the end of a run
    assert config.frequency == 1


def skipped_result():
    one = torch.ones(())
    return StepResult(norm=one, found_inf=one, scale_before=None, report=OverflowReport, known=True)


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_resuming_changes_no_bit(tmp_path, precision):
    def plugin():
        return AmpPrecision(precision, init_scale=2.0**18, growth_interval=3)

    whole = Linear()
    trainer = fit(whole, plugin(), steps=12, data=regression(12), max_epochs=1)
    first = Linear()
    early = fit(first, plugin(), steps=5, data=regression(12))
    early.save_checkpoint(tmp_path / "five.ckpt")
    second = Linear(seed=9)
    data = regression(12)
    rest = torch.utils.data.DataLoader(data.dataset, batch_sampler=list(data.batch_sampler)[5:] * 2)
    late = fit(second, plugin(), steps=12, data=rest, ckpt_path=tmp_path / "five.ckpt")
    assert first.losses + second.losses[:7] == whole.losses
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if precision == "fp16":
        assert trainer.precision_plugin.skipped_steps > 0
        assert late.precision_plugin.state_dict() == trainer.precision_plugin.state_dict()


def test_a_checkpoint_after_teardown_keeps_the_scale(tmp_path):
    trainer = fit(OneWeight(overflow_at=(0,)), AmpPrecision(init_scale=8.0), steps=2)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    payload = torch.load(tmp_path / "late.ckpt", weights_only=True)["MixedPrecision"]
    assert (payload["scale"], payload["_growth_tracker"], payload["optimizer_steps"]) == (4.0, 1, 1)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("bf16", "fp16", "holds no loss scale.*init_scale=8"),
        ("fp16", "bf16", "written in fp16.*the saved one is ignored"),
        ("fp16", "fp32", "written in fp16.*the saved one is ignored"),
    ],
)
def test_another_precision_warns_and_goes_on(tmp_path, before, after, message):
    fit(OneWeight(), AmpPrecision(before)).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=message):
        trainer = fit(
            OneWeight(), AmpPrecision(after, init_scale=8.0), steps=2, ckpt_path=tmp_path / "a.ckpt"
        )
    assert trainer.global_step == 2
    if after == "fp16":
        assert trainer.scaler.get_scale() == 8.0


def test_testing_a_checkpoint_of_another_precision_does_not_warn(tmp_path):
    module = Dtypes()
    trainer = make_trainer(AmpPrecision("fp16"))
    trainer.fit(module, batches(1), batches(1))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    make_trainer(AmpPrecision("bf16")).test(module, batches(1), ckpt_path=tmp_path / "a.ckpt", verbose=False)


# -- what became of a step ----------------------------------------------------------------------


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_any_precision_tells_of_its_steps(precision, manual):
    def step(module, batch, batch_idx):
        if batch_idx == 0:
            with pytest.raises(RuntimeError, match="has not stepped"):
                module.trainer.precision_plugin.last_step(module.optimizers()[0])
        module.manual_backward(batch * (module.a + module.b))
        for optimizer in module.optimizers():
            optimizer.step()
            results.append(module.trainer.precision_plugin.last_step(optimizer))
            optimizer.zero_grad()

    results = []
    plugin = AmpPrecision(precision, init_scale=8.0)
    trainer = fit(TwoOptimizers(step=step) if manual else OneWeight(), plugin, steps=2)
    results.append(plugin.last_step(trainer.optimizers[0]))
    scale = 8.0 if precision == "fp16" else 1.0
    for result in results:
        assert (result.skipped, result.scale_before, result.scale_after) == (False, scale, scale)
        assert not result.overflow_report()
        assert result.norm.item() == 3.0
    assert (plugin.skipped_steps, plugin.optimizer_steps) == (0, 2)
    copy.deepcopy(plugin), pickle.dumps(plugin)


@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None.*")
def test_a_step_before_the_first_loss_is_told_of():
    plugin = AmpPrecision()
    trainer = fit(OneWeight(none_at=(0,)), plugin)
    assert not plugin.last_step(trainer.optimizers[0]).skipped


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"precision": "16-mixd"},
            r"precision='16-mixd' is unknown; allowed are 'fp16', 'bf16', 'fp32'; did you mean precision='fp16'\?",
        ),
        (
            {"eval_precision": "bf16-true"},
            r"weights themselves in 16 bits.*Use eval_precision='bf16': .* in fp32",
        ),
        ({"eval_precision": "16-true"}, r"Use eval_precision='fp16'"),
        ({"precision": torch.float64}, r"precision=torch.float64 is not mixed precision.*'64-true'"),
        ({"precision": "fp4"}, "precision='fp4' is unknown; allowed are"),
        ({"eval_precision": "fp8"}, "eval_precision='fp8' is unknown; allowed are"),
        (
            {"eval_precision": "hallf"},
            "eval_precision='hallf' is unknown.*did you mean eval_precision='fp16'",
        ),
        ({"device": "cuda:0"}, r"device='cuda:0' is unknown.*without an index"),
        ({"device": "gpu"}, "device='gpu' is unknown; allowed are 'cpu', 'cuda', 'xpu', 'mps'"),
        ({"rules": "nofile.yaml"}, r"rules='nofile.yaml': .*No such file.*; give an OpRules or the path"),
        (
            {"rules": {"aten::mm": "fp32"}},
            r"rules=\{'aten::mm': 'fp32'\} is not allowed; give an OpRules or the path",
        ),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        AmpPrecision(**arguments)


@pytest.mark.parametrize(
    ("mine", "names"),
    [
        ("fp16", ["16-mixed", "fp16-mixed", "16", 16, "float16", torch.float16, "half"]),
        ("bf16", ["bf16-mixed", "bfloat16", torch.bfloat16]),
        ("fp32", ["32-true", "32", 32, "float32", torch.float32, "no"]),
    ],
)
@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_names_of_other_projects_are_understood(cls, mine, names):
    for name in names:
        plugin = cls(name, eval_precision=name)
        assert (plugin.settings.precision, plugin.settings.eval_precision) == (mine, mine)
        assert repr(plugin) == f"{cls.__name__}({mine!r})"


def test_one_string_of_fp32_modules():
    with pytest.raises(TypeError, match="give a list"):
        AmpPrecision(fp32_modules="LayerNorm")


def test_rules_are_read_when_the_plugin_is_made(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("device_type: cpu\nrules:\n  aten::softmax.int: lower_precision\n")
    for given in (path, str(path)):
        rules = AmpPrecision(rules=given).settings.rules
        assert rules == amp_plugin.OpRules.from_yaml(path)
        assert AmpPrecision(rules=rules).settings.rules is rules


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AmpPrecision("fp16", init_scal=1.0),
            r"AmpPrecision: unknown option 'init_scal'; did you mean init_scale\? Allowed are precision, init_scale, ",
        ),
        (
            lambda: FabricAmpPrecision(eval_prec="bf16"),
            r"FabricAmpPrecision: .*did you mean eval_precision\?",
        ),
        (
            lambda: AmpMonitor(max_skip=3),
            r"AmpMonitor: unknown option 'max_skip'; did you mean max_skips_in_a_row\? Allowed are ",
        ),
        (
            lambda: AmpPrecision("fp16", "cuda"),
            "AmpPrecision: too many positional arguments; .*allowed are precis",
        ),
        (lambda: classes_for("pytorch_lightning").AmpPrecision(min_scal=1.0), "AmpPrecision: unknown option"),
    ],
)
def test_misspelt_options(make, message):
    with pytest.raises(TypeError, match=message):
        make()


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DeepSpeedStrategy", "DeepSpeed scales losses"),
        ("XLAStrategy", "torch_xla"),
        ("SingleDeviceXLAStrategy", "bfloat16"),
    ],
)
def test_strategies_with_a_precision_of_their_own_are_refused(name, message):
    strategy = type(name, (SingleDeviceStrategy,), {})(device="cpu")
    with pytest.raises(TypeError, match=f"does not work under {name}.*{message}"):
        fit(OneWeight(), AmpPrecision(), strategy=strategy)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_ranks_without_shards_do_not_add_up_their_norms(strategy):
    root = SimpleNamespace(process_group="group", sharding_strategy=strategy)
    whole = strategy is ShardingStrategy.NO_SHARD
    assert scaler_groups(root) == {
        "process_groups": ("group",) if whole else (),
        "sharded_groups": () if whole else ("group",),
    }
    assert scaler_groups(None) == {}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_another_device_than_the_trainers_is_refused(precision, verb):
    text = (
        rf"AmpPrecision\('{precision}', device='cuda'\) .*on 'cpu'.*delete device='cuda'.*accelerator='cuda'"
    )
    module = OneWeight()
    if verb == "validate":
        module.validation_step = module.training_step
    with pytest.raises(ValueError, match=text):
        getattr(make_trainer(AmpPrecision(precision, device="cuda")), verb)(module, batches(2))
    assert module.w.item() == 1.0


def test_a_plugin_follows_its_model_to_another_device():
    plugin = AmpPrecision("bf16")
    for device in ("xpu", "cpu"):
        plugin._start(device)
        assert plugin.device == device
        plugin.teardown()


def test_plugins_of_the_other_kind_say_so():
    with pytest.raises(Exception, match=r"FabricAmpPrecision.*the Trainer takes AmpPrecision"):
        make_trainer(FabricAmpPrecision())
    text = r"delete precision=\.\.\. and keep this plugin.*trainer=Trainer\(plugins.*amp-plugin run"
    with pytest.raises(Exception, match=text):
        make_trainer(AmpPrecision(), precision="16-mixed")


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_plugin_of_the_other_package_says_where_the_right_one_is(package):
    """A library may use one package (neuralforecast) and the program that calls it the other."""
    pytest.importorskip("pytorch_lightning")
    import lightning.pytorch
    import pytorch_lightning

    other = "pytorch_lightning" if package == "lightning" else "lightning"
    trainer = pytorch_lightning.Trainer if package == "lightning" else lightning.pytorch.Trainer
    text = rf"AmpPrecision\('bf16'\) of .*takes AmpPrecision from .*classes_for\('{other}'\)"
    with pytest.raises(Exception, match=text):
        trainer(plugins=[classes_for(package).AmpPrecision("bf16")], accelerator="cpu", logger=False)


@pytest.mark.parametrize("cls", [AmpPrecision, FabricAmpPrecision])
def test_a_plugin_is_printed_without_advice(cls):
    assert str(cls("bf16")) == repr(cls("bf16")) == f"{cls.__name__}('bf16')"


# -- two packages -------------------------------------------------------------------------------


def test_pytorch_lightning_has_classes_of_its_own():
    ours = classes_for("pytorch_lightning")
    pytorch_lightning = importlib.import_module("pytorch_lightning")
    assert issubclass(ours.AmpPrecision, pytorch_lightning.plugins.MixedPrecision)
    assert not issubclass(ours.AmpPrecision, Precision)

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

        def training_step(self, batch):
            return self.w * batch

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Module()
    trainer = pytorch_lightning.Trainer(
        plugins=[ours.AmpPrecision(init_scale=8.0)], callbacks=[ours.AmpMonitor()], accelerator="cpu", max_steps=2,
        logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, batches())
    assert module.w.item() == -5.0
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
    assert classes_for("lightning.fabric") is classes_for("lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "amp_plugin.adapters.lightning.for_pytorch_lightning")
    monkeypatch.delattr(adapter, "for_pytorch_lightning")
    with pytest.raises(ImportError, match="for pytorch_lightning, which is not installed; run: pip install"):
        classes_for("pytorch_lightning")
    with pytest.raises(AttributeError, match="has no attribute 'Amp'"):
        adapter.Amp  # noqa: B018
