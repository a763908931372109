"""One of twenty batches contains a nan. In every precision, the run ends as if that batch had not existed.

That batch makes every gradient nan. The step changes nothing, and the scheduler waits.
"""

import math
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import reset
from tests.adapters.lightning_models import QUIET, fit, make_trainer

pytestmark = QUIET

PRECISIONS = ["fp16", "bf16", "fp32"]
POISONED = 7
OPTIONS = {"init_scale": 2.0**13}  # so large that no fp16 gradient is subnormal, even at half of this scale


def batches(*, poison=math.nan, drop=False):
    x = torch.randn(20, 4, 8, generator=torch.Generator().manual_seed(1))
    x[POISONED] = poison
    return [batch for i, batch in enumerate(x) if not (drop and i == POISONED)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def optimizer_of(net, kind, fused=False):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return kind(net.parameters(), lr=1e-2, fused=fused, **options)


def as_it_is(step):
    return step


def fabric(precision, data, *, kind, fused, clip, through=as_it_is):
    net = network()
    plugin = FabricAmpPrecision(precision, **OPTIONS)
    runs = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = runs.setup(net, optimizer_of(net, kind, fused))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)

    @through
    def step(x):
        optimizer.zero_grad()
        runs.backward(model(x).square().mean())
        if clip:
            plugin.clip_grad_norm_(optimizer, clip)
        optimizer.step()

    for x in data:
        step(x)
        if not plugin.last_step(optimizer).skipped:
            schedule.step()
    return net, optimizer.optimizer, plugin.skipped_steps


def accelerate(precision, data, *, kind, fused, clip, through=as_it_is):
    reset()
    net = network()
    optimizer = optimizer_of(net, kind, fused)
    accelerator = AmpAccelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=True,
        kwargs_handlers=[AmpKwargs(**OPTIONS)],
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, prepared, schedule = accelerator.prepare(net, optimizer, schedule)

    @through
    def step(x):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            schedule.step()
            prepared.zero_grad()

    for x in data:
        step(x)
    return net, optimizer, accelerator.amp_metrics()["skipped_steps"]


class Learner(LightningModule):
    def __init__(self, kind, fused, manual=False, through=as_it_is):
        super().__init__()
        self.training_step = through(self.training_step)
        self.net, self.kind, self.fused = network(), kind, fused
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if not self.automatic_optimization:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if not self.trainer.precision_plugin.last_step(optimizer).skipped:
                schedule.step()
        return loss

    def configure_optimizers(self):
        optimizer = optimizer_of(self.net, self.kind, self.fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(precision, data, *, kind, fused, clip, manual=False, through=as_it_is):
    module = Learner(kind, fused, manual, through)
    plugin = AmpPrecision(precision, **OPTIONS)
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    run = fit(module, plugin, steps=len(data), data=loader, gradient_clip_val=clip)
    return module.net, run.optimizers[0], plugin.skipped_steps


def manual(*args, clip, **kwargs):
    return trainer(*args, **kwargs, clip=None, manual=True)


LOOPS = [fabric, accelerate, trainer, manual]
WAYS = [
    {"kind": torch.optim.AdamW, "fused": False, "clip": None},
    {"kind": torch.optim.AdamW, "fused": True, "clip": 0.05},
    {"kind": torch.optim.SGD, "fused": False, "clip": 0.05},
]


def assert_one_batch_left_no_trace(loop, precision, way, through=as_it_is):
    """Assert that a run with a nan batch equals a run without that batch.

    The run without it is never compiled.
    """
    net, optimizer, skipped = loop(precision, batches(), **way, through=through)
    torch._dynamo.reset()
    other, other_optimizer, _ = loop(precision, batches(drop=True), **way)
    assert skipped == 1
    assert all(param.isfinite().all() for param in net.parameters())
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    mine, theirs = (o.state_dict()["state"].values() for o in (optimizer, other_optimizer))
    for state, other_state in zip(mine, theirs, strict=True):
        assert state.keys() == other_state.keys()
        for a, b in zip(state.values(), other_state.values(), strict=True):
            assert a is b is None or torch.equal(a, b)
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("way", WAYS, ids=["AdamW", "fused-clipped", "SGD-clipped"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_as_if_the_batch_had_not_been_there(loop, precision, way):
    assert_one_batch_left_no_trace(loop, precision, way)


COMPILED = [(trainer, "fp16"), (trainer, "bf16"), (manual, "bf16"), (fabric, "fp32"), (accelerate, "fp16")]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo detected",
    "ignore:.*autograd.function.Function.*should not be instantiated",  # torch 2.11's Dynamo
)
@pytest.mark.parametrize(("loop", "precision"), COMPILED)
def test_so_it_is_where_the_step_is_compiled(loop, precision):
    """Everything in the step is compiled, except for the parts that the Trainer runs itself."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    way = {"kind": torch.optim.AdamW, "fused": False, "clip": 0.05}
    compiled = partial(torch.compile, backend="aot_eager")
    assert_one_batch_left_no_trace(loop, precision, way, through=compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_ignore_lets_the_weights_go(precision):
    module = Learner(torch.optim.AdamW, fused=False)
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    fit(module, AmpPrecision(precision, on_nonfinite="ignore"), steps=20, data=loader)
    assert all(param.isnan().all() for param in module.parameters())


def test_the_monitor_logs_the_skips_of_bf16_from_the_first_on():
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    run = make_trainer(AmpPrecision("bf16"), steps=20, callbacks=[AmpMonitor()])
    run.fit(Learner(torch.optim.AdamW, fused=False), loader)
    assert dict(run.callback_metrics).keys() == {"grad_norm", "skipped_steps"}
    assert run.callback_metrics["skipped_steps"] == 1.0


class LogOfZero(Learner):
    """A module whose loss is log(0), at one known line."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mul(0).log().mean()  # the line that makes the loss infinite
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss


def in_trainer(precision, log_of_zero, *, manual):
    run = make_trainer(AmpPrecision(precision), steps=9, callbacks=[AmpMonitor(max_skips_in_a_row=3)])
    kind, poison = (LogOfZero, 1.0) if log_of_zero else (Learner, math.nan)
    data = batches(poison=poison) if log_of_zero else [torch.full((4, 8), math.nan)] * 9
    module = kind(torch.optim.AdamW, fused=False, manual=manual)
    try:
        run.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    finally:
        assert run.callback_metrics["skipped_steps"] == 2.0
        assert torch.isnan(run.callback_metrics["grad_norm"])


def in_accelerate(precision, log_of_zero):
    accelerator = AmpAccelerator(
        mixed_precision=precision.replace("fp32", "no"),
        cpu=True,
        kwargs_handlers=[AmpKwargs(max_skips_in_a_row=3)],
    )
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def forward_and_backward(batch):
        accelerator.backward(model(batch).mul(0).log().mean())

    for batch in batches(poison=1.0) if log_of_zero else [torch.full((4, 8), math.nan)] * 9:
        optimizer.zero_grad()
        forward_and_backward(batch)
        optimizer.step()


RUNS = {
    "trainer": (partial(in_trainer, manual=False), "use AmpPrecision('bf16')"),
    "manual": (partial(in_trainer, manual=True), "use AmpPrecision('bf16')"),
    "accelerate": (in_accelerate, "use mixed_precision='bf16'"),
}


@pytest.mark.parametrize("log_of_zero", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_only_skips_ends_with_its_parameters_and_the_command_that_finds_the_op(
    run, precision, log_of_zero
):
    program, remedy = RUNS[run]
    text = (
        r"3 steps of \w+ in a row.*nan in 4 gradients: (net\.)?2\.bias, .*`amp-plugin diagnose train.py`"
        ".*max_skips_in_a_row"
    )
    with pytest.raises(RuntimeError, match=text) as error:
        program(precision, log_of_zero)
    assert ("although nothing is scaled" in str(error.value)) is (precision != "fp16")
    assert (remedy in str(error.value)) is (precision == "fp16")
