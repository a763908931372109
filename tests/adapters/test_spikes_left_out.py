"""One of forty batches has a spike. In every entry point, the run ends as if that batch had not existed."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from amp_plugin import Spike
from amp_plugin.adapters.ignite import IgnitePrecision
from tests.adapters import test_poisoned_batches as loops
from tests.adapters.lightning_models import QUIET

pytestmark = QUIET

ROOT = Path(__file__).parents[2]
PLANTED, COUNT = 25, 40
WAYS = [
    {"kind": torch.optim.AdamW, "fused": False, "clip": None},
    {"kind": torch.optim.AdamW, "fused": True, "clip": 0.05},
    {"kind": torch.optim.SGD, "fused": False, "clip": 0.05},
]


def batches(*, drop=False):
    x = torch.randn(COUNT, 32, 8, generator=torch.Generator().manual_seed(1))
    x[PLANTED] *= 6.0
    return [batch for place, batch in enumerate(x) if not (drop and place == PLANTED)]


def ignite(precision, data, *, kind, fused, clip, through=loops.as_it_is):
    net = loops.network()
    optimizer = loops.optimizer_of(net, kind, fused)
    amp = IgnitePrecision(precision, max_norm=clip, **loops.OPTIONS)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @through
    def update(engine, x):
        optimizer.zero_grad()
        with amp.region():
            loss = net(x).square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.step_scheduler(schedule)

    from ignite.engine import Engine

    trainer = Engine(update)
    amp.attach(trainer, net, optimizer)
    trainer.run(data)
    return net, optimizer, trainer.state.metrics["skipped_steps"]


LOOPS = [loops.fabric, loops.accelerate, loops.trainer, loops.manual, ignite]


@pytest.fixture
def options(monkeypatch):
    """Set options for all entry points."""

    def set_them(**spike):
        given = {
            "init_scale": 2.0**6,
            "growth_interval": 7,
            "on_spike": {"window": 32, "warmup": 16, **spike},
        }
        monkeypatch.setattr(loops, "OPTIONS", given)

    return set_them


def assert_left_no_trace(loop, precision, way):
    net, optimizer, skipped = loop(precision, batches(), **way)
    other, other_optimizer, none = loop(precision, batches(drop=True), **way)
    assert (skipped, none) == (1, 0)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    mine, theirs = (o.state_dict()["state"].values() for o in (optimizer, other_optimizer))
    for state, other_state in zip(mine, theirs, strict=True):
        assert all(
            a is b is None or torch.equal(a, b)
            for a, b in zip(state.values(), other_state.values(), strict=True)
        )
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("way", WAYS, ids=["AdamW", "fused-clipped", "SGD-clipped"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_as_if_the_spiked_batch_had_not_been_there(loop, precision, way, options):
    options()
    assert_left_no_trace(loop, precision, way)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_so_it_is_with_a_spike_of_the_loss(loop, options):
    options(of="loss")
    assert_left_no_trace(loop, "bf16", WAYS[0])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo detected",
    "ignore:.*autograd.function.Function.*should not be instantiated",  # torch 2.11's Dynamo
)
@pytest.mark.parametrize(("loop", "precision"), [(loops.fabric, "fp32"), (loops.accelerate, "fp16")])
def test_so_it_is_where_the_step_is_compiled(loop, precision, options):
    options()
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager")
    net, _, skipped = loop(precision, batches(), **WAYS[0], through=compiled)
    torch._dynamo.reset()
    other, _, _ = loop(precision, batches(drop=True), **WAYS[0])
    assert skipped == 1
    assert all(map(torch.equal, net.parameters(), other.parameters()))


PROGRAM = """
import torch
from tests.adapters.test_spikes_left_out import batches
from tests.adapters.test_poisoned_batches import network
import sys

net = network()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for x in batches(drop=sys.argv[1] == "drop"):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save([p.detach() for p in net.parameters()], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.whole_run
def test_so_it_is_in_a_program_that_is_not_edited(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    saved = {}
    for given in ("all", "drop"):
        log, out = tmp_path / f"{given}.jsonl", tmp_path / f"{given}.pt"
        command = [sys.executable, "-m", "amp_plugin", "run", "--on-spike", "{window: 32, warmup: 16}"]
        command += ["--log", str(log), "train.py", given, str(out)]
        subprocess.run(command, cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})
        saved[given] = torch.load(out)
        verdicts = [json.loads(line)["verdict"] for line in log.read_text().splitlines()]
        assert verdicts.count("spike") == (given == "all")
        assert len(verdicts) == COUNT - (given == "drop")
    assert all(map(torch.equal, saved["all"], saved["drop"]))


def test_every_entry_point_takes_a_spike_its_action_and_a_mapping(monkeypatch):
    for given in (Spike(), "skip", {"action": "skip"}):
        assert IgnitePrecision("bf16", on_spike=given).options.on_spike == Spike()
    monkeypatch.setenv("AMP_PLUGIN_ON_SPIKE", "{of: loss, sigma: 8}")
    assert IgnitePrecision("bf16").options.on_spike == Spike(of="loss", sigma=8)
