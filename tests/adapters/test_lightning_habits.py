"""What Lightning's users combine with the plugin: callbacks, Tuner, Trainer flags, repeated and nested runs.

If the stock plugin supports the same, the weights are compared bit for bit.
"""

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import nn

from amp_plugin import AmpMonitor, AmpPrecision, OpRules, autocast
from tests.adapters.lightning_models import QUIET, Linear, make_trainer, regression, stock

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:.*swa_lr.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*was configured so validation will run"),
]
SCALE = 2.0**10
STOCKS = {
    "fp16": lambda growth=2: stock(init_scale=SCALE, growth_interval=growth),
    "bf16": lambda growth=2: MixedPrecision("bf16-mixed", "cpu"),
}
OURS = {
    "fp16": lambda growth=2: AmpPrecision("fp16", init_scale=SCALE, growth_interval=growth),
    "bf16": lambda growth=2: AmpPrecision("bf16"),
}


class Validated(Linear):
    """A regression with a scheduler, validation and a backbone."""

    def __init__(self, **options):
        super().__init__(**options)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.batch_size, self.validated = 8, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(self.backbone(x)), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.validated.append(nn.functional.mse_loss(self.net(self.backbone(x)), y).item())

    def train_dataloader(self):
        return regression(8, self.batch_size)

    def val_dataloader(self):
        return regression(1, self.batch_size, seed=5)


def backbone_first(module):
    """Give the optimizer only the head, because BackboneFinetuning freezes the backbone first."""
    module.configure_optimizers = lambda: torch.optim.SGD(
        [param for param in module.parameters() if param.requires_grad], lr=1e-2
    )


def run(plugin, callbacks=(), prepare=None, **options):
    module = Validated(optimizer=torch.optim.SGD)
    if prepare:
        prepare(module)
    options = {"max_epochs": 4, "max_steps": -1, **options}
    trainer = make_trainer(plugin, callbacks=list(callbacks), **options)
    trainer.fit(module)
    return module, trainer


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(play, precision, growth=2):
    """Assert that a program gives the same numbers under our plugin and under the stock one, and return them."""
    ours, theirs = (play(makes[precision](growth)) for makes in (OURS, STOCKS))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return ours


HABITS = {
    "swa": {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)]},
    "weight averaging": {"callbacks": lambda: [WeightAveraging()]},
    "ema": {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)]},
    "accumulation scheduler": {"callbacks": lambda: [GradientAccumulationScheduler({0: 4, 2: 2})]},
    "backbone finetuning": {
        "callbacks": lambda: [BackboneFinetuning(1, train_bn=False, verbose=False)],
        "prepare": backbone_first,
    },
    "overfit_batches": {"overfit_batches": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "inference_mode": {"inference_mode": False},
    "fast_dev_run": {"fast_dev_run": 2},
    "deterministic": {"deterministic": True, "benchmark": False},
    "reload dataloaders": {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
    "barebones": {
        "barebones": True,
        "log_every_n_steps": 0,
        "accelerator": "cpu" if torch.accelerator.is_available() else "auto",
    },
}


@pytest.fixture
def flags_of_torch(monkeypatch):
    """Restore the process-wide flags that a Trainer sets."""
    # torch's own test modules lock these flags for the whole process when they are imported
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.usefixtures("flags_of_torch")
@pytest.mark.filterwarnings("ignore:.*You requested to overfit")
@pytest.mark.filterwarnings("ignore:.*Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:.*The dataloader.*shuffl")
@pytest.mark.parametrize(
    ("habit", "precision"),
    [(habit, precision) for habit in HABITS for precision in OURS if (habit, precision) != ("swa", "fp16")],
)
def test_same_weights_as_under_the_stock_plugin(habit, precision):
    def play(plugin):
        options = dict(HABITS[habit])
        module, _ = run(plugin, options.pop("callbacks", list)(), **options)
        return state_of(module), module.losses, module.validated

    # With the stock plugin, averages include skipped steps; with ours they do not. So with averages no step
    # may be skipped.
    assert same(play, precision, growth=10_000 if habit in {"weight averaging", "ema"} else 2)[2]


def test_stochastic_weight_averaging_in_fp16():
    """The last epoch runs no backward pass.

    The stock plugin fails at the step of that epoch; ours does not.
    """
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        run(STOCKS["fp16"](), HABITS["swa"]["callbacks"]())
    module, trainer = run(AmpPrecision("fp16", init_scale=SCALE), HABITS["swa"]["callbacks"]())
    expected, _ = run(None, HABITS["swa"]["callbacks"]())
    torch.testing.assert_close(state_of(module), state_of(expected), rtol=1e-3, atol=1e-3)
    assert trainer.precision_plugin.skipped_steps == 0


# -- the Tuner ----------------------------------------------------------------------------------


def test_lr_find_suggests_what_it_does_under_the_stock_plugin(precision, tmp_path):
    def play(plugin):
        module = Validated(optimizer=torch.optim.SGD)
        module.lr = 1e-3
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
        callbacks = [AmpMonitor()] if isinstance(plugin, AmpPrecision) else []
        trainer = make_trainer(plugin, -1, max_epochs=2, default_root_dir=tmp_path, callbacks=callbacks)
        finder = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None)
        after = plugin.state_dict().get("scale")
        trainer.fit(module)
        return finder.results["loss"], finder.results["lr"], after, state_of(module)

    same(play, precision)


# -- checkpoints in the middle ------------------------------------------------------------------


def test_resuming_in_the_middle_of_an_epoch_and_of_a_window(precision, tmp_path):
    """The checkpoint is saved after the first of two micro-batches. Gradients are not saved."""

    def play(plugin):
        path = tmp_path / f"{type(plugin).__name__}.ckpt"

        def save(trainer, *given):
            if given[-1] == 4 and not path.exists():  # the index of the batch
                trainer.save_checkpoint(path)

        options = {"max_epochs": 1, "accumulate_grad_batches": 2}
        run(plugin, [LambdaCallback(on_train_batch_end=save)], **options)
        again = Validated(optimizer=torch.optim.SGD, seed=3)
        make = OURS if isinstance(plugin, AmpPrecision) else STOCKS
        make_trainer(make[precision](), -1, **options).fit(again, ckpt_path=path)
        return state_of(again), again.losses

    same(play, precision)


# -- several runs in one process ----------------------------------------------------------------


def alone(precision):
    module, _ = run(OURS[precision](), max_epochs=1)
    return state_of(module)


@pytest.mark.native
def test_runs_one_after_another_are_stocks_also_behind_one_that_failed():
    """Each precision runs twice and equals the stock plugin.

    Between these runs, runs with their own op rules fail.
    """

    def play(*makes):
        finals = []
        for plugin in [make() for make in makes * 2]:
            module, _ = run(plugin, max_epochs=1)
            finals.append((state_of(module), module.losses))
            if isinstance(plugin, AmpPrecision):
                fail_with_rules()
        return finals

    ours = play(*OURS.values(), lambda: AmpPrecision("fp32"))
    torch.testing.assert_close(ours, play(*STOCKS.values(), lambda: None), rtol=0, atol=0)


def fail_with_rules():
    """Train in bf16 with Linear in fp32 until a step raises.

    Afterwards autocast blocks must follow the default rules again.
    """
    module, x = RaisesOnce(), torch.ones(1, 8)
    linear, dtypes = module.net[0], []
    linear.register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    rules = OpRules.default("cpu").with_rule("aten::linear", "fp32")
    with pytest.raises(ArithmeticError, match="once"):
        make_trainer(AmpPrecision("bf16", rules=rules), -1, max_epochs=1).fit(module)
    assert dtypes == [torch.float32] * 4
    for block in (torch.autocast, autocast):
        with block("cpu", dtype=torch.bfloat16):
            assert linear(x).dtype is torch.bfloat16
    assert linear(x).dtype is torch.float32


@pytest.mark.parametrize(("outer", "inner"), [("fp16", "bf16"), ("bf16", "fp16")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_inside_a_run(outer, inner, accumulate):
    """Another Trainer runs in the middle of an epoch, and changes nothing in the outer run."""
    inners = []

    def train_another(*given):
        if given[-1] == 3:
            inners.append(alone(inner))

    expected, _ = run(OURS[outer](), max_epochs=1, accumulate_grad_batches=accumulate)
    callback = LambdaCallback(on_train_batch_end=train_another)
    module, trainer = run(OURS[outer](), [callback], max_epochs=1, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(state_of(module), state_of(expected), rtol=0, atol=0)
    torch.testing.assert_close(inners, [alone(inner)], rtol=0, atol=0)
    assert trainer.precision_plugin.settings.precision == outer


class RaisesOnce(Validated):
    def __init__(self):
        super().__init__(optimizer=torch.optim.SGD)
        self.raises = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.raises and batch_idx == 3:
            raise ArithmeticError("once")
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_second_fit_after_an_exception_in_training_step(precision, accumulate, same_trainer):
    def play(plugin):
        module, options = RaisesOnce(), {"max_epochs": 1, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(plugin, -1, **options)
        with pytest.raises(ArithmeticError, match="once"):
            trainer.fit(module)
        assert not torch.is_autocast_enabled("cpu")
        module.raises = False
        trainer = trainer if same_trainer else make_trainer(plugin, -1, **options)
        trainer.fit(module)
        return state_of(module), trainer.global_step, plugin.state_dict().get("scale")

    same(play, precision)
