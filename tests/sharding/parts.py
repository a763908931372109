"""The parts of the ranks' program: functions that return values that can be written as JSON."""

import functools
import traceback
from collections import Counter
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from amp_plugin import autocast, log_collectives
from amp_plugin.sharding.fully_shard import fsdp1_policy
from amp_plugin.sharding.report import shard_units
from tests.sharding.checkpoints import resume, save
from tests.sharding.expected_collectives import planned
from tests.sharding.fronts import FRONTS, STRATEGIES, fp32_modules_of, shard, share_of, shares, wrap
from tests.sharding.models import FEW_STEPS, IN_FP32, STEPS, Block, Net, alone, loss_of, plan
from tests.sharding.variants import variants


def rows(counter):
    return sorted([*asdict(call).values(), count] for call, count in counter.items())


def recorded(model, strategy):
    with log_collectives() as log:
        with autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, 0, share_of(strategy))
        loss.backward()
    return log


def compare(calls, units, dtypes, strategy):
    """Return the calls that the plan does not expect, and the expected calls that did not happen."""
    names = {unit.name for unit in units}
    seen, want = Counter(calls), planned(names, dtypes, strategy, dist.get_world_size())
    return {"extra": rows(seen - want), "missing": rows(want - seen), "calls": sum(seen.values())}


def collectives(_, __):
    """Compare the collectives of a forward and backward pass with the planned ones."""
    report = {}
    ranks = dist.get_world_size()

    def check(key, strategy, dtypes, told=None):
        model = sharded_as(strategy, told or dtypes)
        report[key] = compare(recorded(model, strategy), shard_units(model), dtypes, strategy)

    for reduce in ("fp32", "bf16"):
        for strategy in ("fsdp2", "hsdp", "tp") if ranks == 4 else ("fsdp2",):
            check(f"{strategy} {reduce}", strategy, plan("bf16", IN_FP32, reduce))
        for modules in ((), IN_FP32):
            way = "all weights in fp32" if modules else "weights in bf16"
            check(f"fsdp1 {reduce} {way}", "fsdp1", plan("bf16", modules, reduce))
    for strategy in ("fsdp1", "fsdp2"):
        check(f"{strategy} broken", strategy, plan(), told=plan("bf16", (), "bf16"))
    return report


def sharded_as(strategy, dtypes):
    if strategy != "fsdp1":
        return shard(Net(), dtypes, strategy)
    return wrap(Net(), fsdp1_policy(dtypes), auto_wrap_policy=ModuleWrapPolicy({Block}))


def equality(_, whole):
    """Return the relative distance of losses and weights from one process, after 20 steps or the first few."""
    steps = STEPS if whole else FEW_STEPS
    start = torch.cat([param.detach().flatten() for param in Net().parameters()])

    def against_one_process(key, front, strategy):
        losses, weights = reference(strategy, steps)
        with log_collectives() as log:
            run = front(strategy, steps=steps, log=log)
        dtypes = plan("bf16", fp32_modules_of(strategy))
        return {
            key: {
                "losses": ((run.mean_losses() - losses).abs() / losses.abs()).max().item(),
                "weights": ((run.weights - weights).norm() / weights.norm()).item(),
                "moved": ((weights - start).norm() / weights.norm()).item(),
                "steps": len(run.losses),
                "last": compare(run.collectives_of_last_step(), run.units, dtypes, strategy),
            }
        }

    return each(against_one_process, equality_runs(whole))


@functools.cache
def reference(strategy, steps):
    return alone(shares(strategy, dist.get_world_size()), "bf16", fp32_modules_of(strategy), steps)


RUNS = [f"{front} {strategy}" for strategy in STRATEGIES for front in FRONTS]

# The optimizers of the few runs in which a gradient overflows. A whole run takes both everywhere.
FEW_OVERFLOWS = {
    "plain fsdp1": "plain",
    "fabric fsdp1": "fused",
    "trainer fsdp2": "fused",
    "accelerate fsdp2": "plain",
    "plain hsdp": "fused",
    "fabric hsdp": "plain",
    "trainer tp": "plain",
    "accelerate tp": "fused",
}


def equality_runs(whole):
    """Return the runs that are compared with one process.

    Few runs are those without an overflow. So each strategy still runs under each entry point.
    """
    return [run for run in RUNS if whole or run not in FEW_OVERFLOWS]


def overflow_ways(run, whole):
    """Return the kinds of optimizers with which a strategy overflows under an entry point."""
    few = FEW_OVERFLOWS.get(run)
    return ("fused", "plain") if whole else (few,) if few else ()


def overflow(_, whole):
    """Return which of three fp16 steps were skipped. In the second one, one element overflows on one rank."""

    def skips(key, front, strategy):
        report = {}
        for way in overflow_ways(key, whole):
            run = front(strategy, "fp16", fused=way == "fused", steps=3, poison=1)
            finite = bool(run.weights.isfinite().all())
            report[f"{key} {way}"] = {
                "skipped": run.skipped,
                "finite": finite,
                "scale": run.scale,
            }
        return report

    return each(skips, RUNS)


def each(run, keys):
    """Run strategies under entry points. If a run raises an error, the error is its result."""
    report = {}
    for key in keys:
        name, strategy = key.split()
        try:
            report |= run(key, FRONTS[name], strategy)
        except Exception:  # noqa: BLE001 -- the test shows it, and the other parts go on
            report[key] = {"error": traceback.format_exc()}
    return report


def refusals(_, __):
    """Return the error for weights stored in 16 bits under FSDP1, which keeps float32 weights."""
    report = {}
    for name, front in FRONTS.items():
        try:
            front("fsdp1", steps=1, weights="bf16")
        except TypeError as error:
            report[name] = str(error)
    return report


def stored(_, __):
    """Under every entry point, compare runs with weights stored in 16 bits with runs of float32 shards."""
    report = {}
    for name, front in FRONTS.items():
        try:
            plain, exact = (front("fsdp2", steps=FEW_STEPS, weights=weights) for weights in ("fp32", "bf16"))
            report[name] = {
                "equal": bool(plain.weights.equal(exact.weights)),
                "losses": [loss.item() for loss in plain.losses] == [loss.item() for loss in exact.losses],
                "stored": exact.stored,
            }
        except Exception:  # noqa: BLE001 -- the test shows it, and the other parts go on
            report[name] = {"error": traceback.format_exc()}
    return report


PARTS = {
    "collectives": collectives,
    "equality": equality,
    "overflow": overflow,
    "variants": variants,
    "refusals": refusals,
    "stored": stored,
    "save": save,
    "resume": resume,
}
