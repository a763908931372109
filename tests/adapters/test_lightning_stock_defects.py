"""Defects of the stock plugin are shown in programs. Our plugin runs the same programs without them.

If a row or a test of the ``stock`` half fails, Lightning has fixed the defect.
"""

import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from amp_plugin.adapters.lightning import AmpPrecision
from tests.adapters.lightning_models import (
    AFTER_2_6,
    QUIET,
    Linear,
    OneWeight,
    TwoOptimizers,
    fit,
    regression,
    stock,
)

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:.*training_step.*returned.*None.*")]


# -- numbers ------------------------------------------------------------------------------------


def joint_backward(plugin, **options):
    """Step two optimizers after one backward pass. Each gradient is 3."""
    module = TwoOptimizers(**options)
    fit(module, plugin)
    return [number for steps in module.seen for number in steps]


def different_cadence(plugin):
    """``a`` steps after every batch, ``b`` after every second one.

    The scale grows with each step of ``a``.
    """

    def step(module, batch, batch_idx):
        first, second = module.optimizers()
        first.zero_grad()
        module.manual_backward(batch * (module.a + module.b))
        first.step()
        if batch_idx % 2:
            before = module.b.item()
            second.step()
            module.seen.append(before - module.b.item())
            second.zero_grad()

    module = TwoOptimizers(step=step)
    fit(module, plugin, steps=3)
    return module.seen


def clip_by_hand(plugin, algorithm):
    def step(module, batch, batch_idx):
        optimizer, _ = module.optimizers()
        module.manual_backward(batch * module.a)
        module.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm=algorithm)
        optimizer.step()

    module = TwoOptimizers(step=step)
    fit(module, plugin)
    return [1.0 - module.a.item()]


class GradientNorm(Callback):
    """A callback that logs gradient norms."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item() if grads else None)


def seen_by_a_hook_of_a_fused_optimizer(plugin):
    norms = GradientNorm()
    fit(OneWeight(fused=True), plugin, callbacks=[norms])
    return norms.norms


def loss_seen_before_backward(plugin):
    seen = []
    callback = LambdaCallback(on_before_backward=lambda *given: seen.append(given[-1].item()))
    fit(OneWeight(), plugin, callbacks=[callback])
    return seen


def none_as_the_last_loss_of_a_window(plugin):
    """Return the norms that a hook saw, and the weight.

    The weight stays 1 if the window's gradients were lost.
    """
    norms, module = GradientNorm(), OneWeight(none_at=(1,))
    fit(module, plugin, callbacks=[norms], accumulate_grad_batches=2)
    return [*norms.norms, module.w.item()]


def harmonic(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))}


def rates_while_steps_are_skipped(plugin, **options):
    module = OneWeight(overflow_at=(0, 1), scheduler=harmonic, **options)
    fit(module, plugin, steps=3)
    return module.lrs


class Underflow(OneWeight):
    """Its output has a derivative of 1e-8, which float16 cannot represent."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.net.weight)

    def training_step(self, batch, batch_idx):
        plugin, x = self.trainer.precision_plugin, batch.reshape(1, 1).requires_grad_()
        grad_of = getattr(plugin, "grad", torch.autograd.grad)
        (grad,) = grad_of(1e-8 * self.net(x).float().sum(), x, create_graph=True)
        self.seen = grad.item()
        return super().training_step(batch, batch_idx)


def derivative_for_a_penalty(plugin):
    module = Underflow()
    fit(module, plugin)
    return [module.seen]


FIRST_OVERFLOWS = partial(joint_backward, overflow_a=True)
RATES = [0.5, 1 / 3, 0.25], [1, 1, 0.5]
GROWS, LARGE = {"init_scale": 2.0, "growth_interval": 1}, {"init_scale": 1024.0}
# A program, the options of the plugin, and the numbers from the stock plugin and from ours.
NUMBERS = {
    "the scale grows between two steps": (joint_backward, GROWS, [3.0, 1.5], [3.0, 3.0]),
    "the first of two overflows": (FIRST_OVERFLOWS, {"init_scale": 8.0}, [0.0, 6.0], [0.0, 3.0]),
    "different cadence": (different_cadence, GROWS, [2.25], [6.0]),
    "norm clipped by hand": (partial(clip_by_hand, algorithm="norm"), LARGE, [1 / 1024], [1.0]),
    "value clipped by hand": (partial(clip_by_hand, algorithm="value"), LARGE, [1 / 1024], [1.0]),
    "hook of a fused optimizer": (seen_by_a_hook_of_a_fused_optimizer, LARGE, [3072.0], [3.0]),
    "on_before_backward": (loss_seen_before_backward, LARGE, [3072.0], [3.0]),
    "None at the end of a window": (none_as_the_last_loss_of_a_window, LARGE, [1536.0, 1.0], [1.5, -0.5]),
    "scheduler": (rates_while_steps_are_skipped, {}, *RATES),
    "fused scheduler": (partial(rates_while_steps_are_skipped, fused=True), {}, *RATES),
    "penalty": (derivative_for_a_penalty, {}, [0.0], [1e-8]),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step.*")
@pytest.mark.parametrize("whose", ["stock", "ours"])
@pytest.mark.parametrize("defect", NUMBERS)
def test_numbers(defect, whose):
    play, options, *expected = NUMBERS[defect]
    plugin = stock(**options) if whose == "stock" else AmpPrecision(**options)
    assert play(plugin) == pytest.approx(expected[whose == "ours"], rel=1e-3)


# -- errors -------------------------------------------------------------------------------------


def test_an_optimizer_without_gradients():
    def step(module, batch, batch_idx):
        first, second = module.optimizers()
        module.manual_backward(batch * module.b)
        first.step()
        second.step()

    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        fit(TwoOptimizers(step=step), stock())
    module = TwoOptimizers(step=step)
    fit(module, AmpPrecision())
    assert (module.a.item(), module.b.item()) == (1.0, -2.0)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_clipping_with_a_fused_optimizer_stock(precision):
    """Lightning 2.6 raises an error. Its next release can clip in bf16 (Lightning-AI #21436)."""
    plugin = stock() if precision == "16-mixed" else MixedPrecision(precision, "cpu")
    refused = pytest.raises(RuntimeError, match="does not allow for gradient clipping")
    with nullcontext() if AFTER_2_6 and plugin.scaler is None else refused:
        fit(Linear(fused=True), plugin, data=regression(), gradient_clip_val=0.1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("looked_at", [True, False])
def test_clipping_with_a_fused_optimizer(precision, algorithm, looked_at):
    def weights(fused, **options):
        module = Linear(torch.optim.SGD, fused=fused)
        options |= {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
        fit(module, AmpPrecision(precision), steps=8, data=regression(), **options)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    callbacks = [GradientNorm()] if looked_at else []
    torch.testing.assert_close(weights(True, callbacks=callbacks), weights(False), rtol=1e-6, atol=1e-7)


# -- scope --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plugin", "outside"), [(stock, True), (AmpPrecision, False)], ids=["stock", "ours"])
def test_backward_hooks_and_step_of_manual_optimization_run_without_autocast(plugin, outside):
    on, hooks = {}, ("on_before_backward", "on_after_backward", "on_before_optimizer_step")

    def note(where, *_):
        on[where] = torch.is_autocast_enabled("cpu")

    def step(module, batch, batch_idx):
        optimizer, _ = module.optimizers()
        note("forward")
        loss = batch * module.a
        module.a.register_hook(partial(note, "backward"))
        module.manual_backward(loss)
        optimizer.step()
        note("after the step")

    callback = LambdaCallback(**{name: partial(note, name) for name in hooks})
    fit(TwoOptimizers(step=step), plugin(), callbacks=[callback])
    inside = dict.fromkeys(("forward", "after the step"), True)
    assert on == dict.fromkeys((*hooks, "backward"), outside) | inside


# -- steps without a loss, closures -------------------------------------------------------------


@pytest.mark.parametrize("none_at", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (3, 4, 5)])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_none_at_any_place_of_a_window(none_at, precision):
    norms = GradientNorm()
    module = OneWeight(none_at=none_at)
    fit(module, AmpPrecision(precision), steps=2, callbacks=[norms], accumulate_grad_batches=3)
    expected = [sum(i not in none_at for i in range(start, start + 3)) for start in (0, 3)]
    assert [norm or 0.0 for norm in norms.norms] == expected
    assert module.w.item() == 1.0 - sum(expected)


def test_a_step_without_any_loss_has_a_result():
    trainer = fit(OneWeight(none_at=(0,)), plugin := AmpPrecision())
    assert not plugin.last_step(trainer.optimizers[0]).skipped


class ByHand(Linear):
    """Steps LBFGS with a closure, and records whether autocast is on in it."""

    def __init__(self):
        super().__init__(torch.optim.LBFGS, lr=0.1, max_iter=4)
        self.automatic_optimization = False
        self.enabled = set()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            self.enabled.add(torch.is_autocast_enabled("cpu"))
            loss = super(ByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def test_lbfgs():
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(Linear(torch.optim.LBFGS, lr=0.1), stock(), data=regression())
    results = {}
    for precision in ("fp16", "fp32"):
        module, plugin = ByHand(), AmpPrecision(precision, init_scale=1024.0)
        fit(module, plugin, steps=3, data=regression(3, 64, repeat=True))
        assert len(module.losses) > 9  # each step evaluates the closure several times
        assert plugin.skipped_steps == 0
        assert module.enabled == {precision == "fp16"}
        results[precision] = module.losses
    assert results["fp16"][-1] < results["fp16"][0] / 5
    # compared early: later the line search amplifies fp16's rounding errors
    torch.testing.assert_close(results["fp16"][:3], results["fp32"][:3], rtol=0.01, atol=0.0)


class Lookback(torch.optim.SGD):
    """Takes half a step, computes the gradient there, and then steps from the original point, as SAM does."""

    calls_closure_again = True

    def step(self, closure=None):
        loss = closure()
        (param,) = self.param_groups[0]["params"]
        with torch.no_grad():
            start = param.clone()
            param -= 0.5 * self.param_groups[0]["lr"] * param.grad
            closure()
            param.copy_(start - self.param_groups[0]["lr"] * param.grad)
        return loss


@pytest.mark.parametrize("overflow_at", [0, 1, 2])
@pytest.mark.parametrize("kind", ["LBFGS", "Lookback"])
def test_an_overflow_in_a_window_of_a_repeated_closure(kind, overflow_at):
    class Module(OneWeight):
        def __init__(self):
            super().__init__(overflow_at=(overflow_at,))
            self.seen = set()

        def training_step(self, batch, batch_idx):
            self.seen.add(batch_idx)
            return 0.5 * super().training_step(batch, batch_idx) ** 2

        def configure_optimizers(self):
            if kind == "Lookback":
                return Lookback(self.parameters(), lr=0.01)
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    module = Module()
    trainer = fit(module, AmpPrecision(init_scale=1024.0), steps=2, accumulate_grad_batches=3)
    plugin = trainer.precision_plugin
    assert module.seen == set(range(6))  # the module saw every batch, as in fp32
    assert (plugin.optimizer_steps, plugin.skipped_steps) == (1, 1)
    assert plugin.scaler.get_scale() == 512.0
    assert 0.0 < module.w.item() < 1.0  # only the second window's step was taken


# -- schedulers and steps -----------------------------------------------------------------------


def test_a_held_scheduler_saves_what_stock_saves(tmp_path):
    states = []
    for plugin in (stock(), AmpPrecision()):
        module = OneWeight(scheduler=harmonic)
        trainer = fit(module, plugin, steps=3)
        path = tmp_path / "a.ckpt"
        trainer.save_checkpoint(path)
        pickle.dumps(trainer.lr_scheduler_configs[0].scheduler.optimizer.state_dict())
        checkpoint = torch.load(path, weights_only=False)
        states.append((checkpoint["lr_schedulers"], sorted(checkpoint)))
        assert vars(trainer.lr_scheduler_configs[0].scheduler).keys() >= {"optimizer", "base_lrs"}
    assert states[0] == states[1]


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision", "native_amp_scaling_state"])
@pytest.mark.parametrize(("saves", "loads"), [(stock, AmpPrecision), (AmpPrecision, stock)])
def test_checkpoints_are_exchanged_with_the_stock_plugin(tmp_path, saves, loads, key):
    path = tmp_path / "run.ckpt"
    fit(OneWeight(), saves(init_scale=256.0)).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=saves is AmpPrecision)
    checkpoint[key if saves is stock else "MixedPrecision"] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, path)
    trainer = fit(OneWeight(), loads(init_scale=8.0), steps=2, ckpt_path=path)
    assert trainer.scaler.get_scale() == 256.0
