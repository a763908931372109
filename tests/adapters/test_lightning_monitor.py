"""AmpMonitor: what it logs, when it warns and when it stops."""

from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics import MeanMetric

from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision
from amp_plugin.scaling.step_log import StepResult
from tests.adapters.lightning_models import (
    QUIET,
    Linear,
    OneWeight,
    TwoOptimizers,
    batches,
    fit,
    make_trainer,
    regression,
)

pytestmark = QUIET


class Look(Callback):
    """A callback that keeps the values in the progress bar."""

    def on_train_batch_end(self, trainer, *_):
        self.shown = dict(trainer.progress_bar_metrics)


def test_loggers_and_the_progress_bar_get_scale_skips_and_norm(tmp_path):
    loggers = [kind(tmp_path / kind.__name__, name="", version="") for kind in (TensorBoardLogger, CSVLogger)]
    module, look = OneWeight(overflow_at=(1,)), Look()
    plugin = AmpPrecision(init_scale=8.0, growth_interval=2)
    fit(module, plugin, steps=4, logger=loggers, callbacks=[AmpMonitor(), look])
    for logger in loggers:
        logger.save()
    loggers[0].experiment.flush()
    events = EventAccumulator(str(tmp_path / "TensorBoardLogger")).Reload()
    read = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert read["loss_scale"] == [8.0, 4.0, 4.0, 8.0]
    assert read["skipped_steps"] == [0.0, 1.0, 1.0, 1.0]
    assert read["grad_norm"][0] == 3.0
    assert not torch.isfinite(torch.tensor(read["grad_norm"][1]))
    header, *rows = (tmp_path / "CSVLogger" / "metrics.csv").read_text().splitlines()
    assert {"loss_scale", "skipped_steps", "grad_norm"} <= set(header.split(","))
    assert len(rows) == 4
    assert look.shown == {"loss_scale": 8.0, "skipped_steps": 1.0, "grad_norm": 3.0}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 1.0}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}]
)
def test_the_norm_alone_is_logged_where_nothing_is_scaled(precision, clip):
    monitor, look = AmpMonitor(), Look()
    plugin = AmpPrecision(precision)
    options = {**clip, "accumulate_grad_batches": 2}
    trainer = fit(OneWeight(), plugin, steps=2, callbacks=[monitor, look], **options)
    # the norm of the window's mean gradient
    assert dict(trainer.callback_metrics) == look.shown == {"grad_norm": 3.0}
    assert plugin.last_step(trainer.optimizers[0]).norm.item() == 3.0  # the norm before clipping
    assert monitor.skipped_steps == 0


def test_the_bytes_per_parameter_are_logged_once_a_step_was_taken(caplog):
    monitor, told, module = AmpMonitor(), [], OneWeight(overflow_at=(0, 1))
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    keep = LambdaCallback(on_train_batch_end=lambda *_: told.append(monitor.weight_bytes))
    with caplog.at_level("INFO"):
        fit(module, AmpPrecision("fp16"), steps=4, callbacks=[monitor, keep])
    assert told[:2] == [None, None]
    assert told[3] is told[2]
    each = told[2].per_parameter()
    assert (each["weights"], each["masters"], each["gradients"]) == (4, 0, 4)
    assert each["optimizer_state"] >= 8
    assert [text for text in caplog.messages if "holds" in text] == [f"training holds {told[2]}"]


def one_in_turn(module, batch, batch_idx):
    optimizer = module.optimizers()[0 if batch_idx < 2 else 1]
    module.manual_backward(batch * (module.a + module.b))
    optimizer.step()


@pytest.mark.parametrize(("steps", "state"), [(2, 4), (4, 8)])
def test_the_bytes_are_counted_once_all_optimizers_have_state_or_at_the_end(caplog, steps, state):
    """Two weights, each with a momentum of 4 bytes. The optimizer of the second one steps from batch 2 on."""
    monitor, module, told = AmpMonitor(), TwoOptimizers(step=one_in_turn), []
    module.configure_optimizers = lambda: [torch.optim.SGD([w], 1e-3, 0.9) for w in (module.a, module.b)]
    keep = LambdaCallback(on_train_batch_end=lambda *_: told.append(monitor.weight_bytes))
    with caplog.at_level("INFO"):
        fit(module, AmpPrecision("fp16", init_scale=1.0), steps=steps, callbacks=[monitor, keep])
    assert [counted is None for counted in told] == [True, True, False, False][:steps]
    assert monitor.weight_bytes.optimizer_state == state
    assert [text for text in caplog.messages if "holds" in text] == [f"training holds {monitor.weight_bytes}"]


@pytest.mark.parametrize("callbacks", [[], [AmpMonitor()]])
def test_a_fit_that_took_no_step_ends_with_a_warning(precision, callbacks):
    """The warning also comes after an earlier fit failed, and while the program handles that error."""
    plugin, fails = AmpPrecision(precision), LambdaCallback(on_train_batch_end=Mock(side_effect=OSError))
    try:
        fit(OneWeight(), plugin, callbacks=[fails])
    except OSError:
        with pytest.warns(UserWarning, match="no optimizer step was taken: 2 steps of SGD in a row"):
            fit(OneWeight(overflow_at=(0, 1)), plugin, steps=2, callbacks=callbacks)
    fails.on_train_batch_end.assert_called_once()
    fit(OneWeight(overflow_at=(1, 2)), plugin, steps=3, callbacks=callbacks)


def overflow_in_a(module, batch, batch_idx):
    first, second = module.optimizers()
    module.manual_backward(batch * (module.a * torch.inf + module.b))
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()


def test_a_finite_batch_ends_a_row():
    module, monitor = OneWeight(overflow_at=(0, 1, 3, 4, 5, 6, 7)), AmpMonitor(max_skips_in_a_row=3)
    with pytest.raises(RuntimeError, match=r"inf in 1 gradient: w\b.*fp32_modules"):
        fit(module, AmpPrecision(), steps=9, callbacks=[monitor])
    assert (module.w.item(), monitor.skipped_steps) == (1.0 - 3.0, 5)


def test_each_optimizer_has_a_row_of_its_own():
    module, monitor = TwoOptimizers(step=overflow_in_a), AmpMonitor(max_skips_in_a_row=3)
    with pytest.raises(RuntimeError, match=r"3 steps of \w+ in a row.*inf in 1 gradient: a\)"):
        fit(module, AmpPrecision(), steps=20, callbacks=[monitor])
    assert (module.a.item(), module.b.item()) == (1.0, 1.0 - 3 * 3.0)


def test_a_resumed_run_goes_on_counting(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(OneWeight(overflow_at=(0, 1)), AmpPrecision(), steps=2).save_checkpoint(path)
    monitor = AmpMonitor()
    trainer = fit(OneWeight(overflow_at=(2,)), AmpPrecision(), steps=4, ckpt_path=path, callbacks=[monitor])
    assert monitor.skipped_steps == trainer.precision_plugin.skipped_steps == 3
    assert trainer.callback_metrics["skipped_steps"] == 3.0


def test_results_are_read_every_few_steps(monkeypatch):
    """This applies if the host must wait for results, as on a GPU."""
    monkeypatch.setattr(StepResult, "known_at_once", staticmethod(lambda flag: None))
    monitor = AmpMonitor(max_skips_in_a_row=2, every_n_steps=4)
    module = OneWeight(overflow_at=range(9), fused=True)
    with pytest.raises(RuntimeError, match=r"2 steps of \w+ in a row"):
        fit(module, AmpPrecision(), steps=9, callbacks=[monitor])
    assert len(module.lrs) == 3  # noticed when the fourth step reads the results


def test_it_watches_amp_precision_only():
    with pytest.raises(TypeError, match=r"this Trainer has MixedPrecision; add plugins=\[AmpPrecision"):
        fit(OneWeight(), MixedPrecision("bf16-mixed", "cpu"), callbacks=[AmpMonitor()])


@pytest.mark.parametrize("option", ["max_skips_in_a_row", "every_n_steps"])
@pytest.mark.parametrize("value", [0, "3"])
def test_wrong_numbers(option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r} is not allowed; give a whole number"):
        AmpMonitor(**{option: value})


def test_a_second_fit_after_an_exception_counts_each_step_once():
    class Interrupted(OneWeight):
        def on_train_batch_start(self, batch, batch_idx):
            if not self.seen and batch_idx == 1:
                self.seen = True
                raise ZeroDivisionError

    module, monitor = Interrupted(overflow_at=range(9)), AmpMonitor(max_skips_in_a_row=6)
    module.seen = False
    trainer = make_trainer(AmpPrecision(), 5, callbacks=[monitor])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, batches())
    trainer.fit(module, batches())
    assert monitor.skipped_steps == trainer.precision_plugin.skipped_steps == 5
    assert not trainer.precision_plugin.measures_norms


class Traced(Linear):
    """A module that logs, updates a metric, and can clip and step by hand. Its fourth loss is infinite."""

    def __init__(self, by_hand):
        super().__init__()
        self.automatic_optimization, self.mean, self.batches = not by_hand, MeanMetric(), 0
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, *batch_and_index):
        self.batches += 1
        loss = super().training_step(*batch_and_index)
        self.mean.update(loss)  # changes the metric's state in place
        self.mean(loss)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("batches", 1.0, on_epoch=True, reduce_fx="sum")
        loss = loss * torch.inf if batch_and_index[1] == 3 else loss
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_end(self):
        self.measured = self.mean.compute(), self.trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_run_with_a_page_logs_and_counts_what_one_without_does(by_hand, precision, tmp_path):
    """The module holds a torchmetrics metric, whose hash depends on its state."""
    runs = []
    for report in (None, tmp_path / "run.html"):
        module, monitor = Traced(by_hand), AmpMonitor(report=report)
        plugin, hook = AmpPrecision(precision, init_scale=1024.0), Mock()
        callbacks = [monitor, LambdaCallback(on_before_backward=hook, on_after_backward=hook)]
        trainer = fit(module, plugin, 6, regression(8), callbacks=callbacks, profiler="simple")
        runs.append(
            (dict(trainer.callback_metrics), trainer.global_step, module.measured, module.state_dict())
        )
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert (len(module.losses), hook.call_count) == (6, 2 * 6)
    assert (tmp_path / "run.html").exists()
    assert not vars(module).keys() & {"log"}
