"""A finite spike is skipped or clipped, or raises an error. A skipped spike leaves no trace."""

import copy
import math
import pickle

import pytest
import torch

from amp_plugin import GradScaler, OptionError, Spike, SpikeError
from tests.scaling.runs import Run, everything, scaler_of

PLANTED, STEPS = 9, 16
RULE = {"window": 8, "warmup": 6}
SCALES = [None, 2.0**10]


def run(rule, scale=None, *, kind="adamw", planted=True, factor=40.0, way="plain", micro=1, **options):
    """Train with a schedule that follows the steps taken. Step PLANTED is a spike, or is left out."""
    growth = {} if scale is None else {"growth_interval": 3}
    training = Run(kind, scaler=scaler_of(scale, on_spike=rule, **growth), **options)
    optimizer, scaler = training.optimizer, training.scaler
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    verdicts = []
    for seed in range(STEPS):
        if seed == PLANTED and not planted:
            continue
        scaled = factor if seed == PLANTED else 1.0
        if way == "closure":

            def closure(seed=seed, scaled=scaled):
                training.backward(seed, scaled)
                return torch.zeros(())

            scaler.step(optimizer, closure)
        else:
            training.backward(seed, scaled)
            for part in range(1, micro):
                generator = torch.Generator().manual_seed(100 * part + seed)
                grads = [torch.randn(p.shape, generator=generator) * scaled for p in training.params]
                loss = sum((p * g).sum() for p, g in zip(training.params, grads, strict=True))
                scaler.scale(loss).backward()
            if way == "clip":
                scaler.clip_grad_norm_(optimizer, 2.0)
            if way == "clip and step":
                scaler.clip_and_step(optimizer, 2.0)
            else:
                scaler.step(optimizer)
        scaler.update()
        if scaler.landed(optimizer):
            schedule.step()
        verdicts.append(scaler.last_step(optimizer).verdict)
    return training, verdicts


def same(one, other):
    mine, theirs = (
        [*run.params, *(v for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
        for run in (one, other)
    )
    assert all(map(torch.equal, mine, theirs))
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]
    assert one.scaler.get_scale() == other.scaler.get_scale()
    if one.scaler.is_enabled():
        tracked = [run.scaler.state_dict()["_growth_tracker"] for run in (one, other)]
        assert tracked[0] == tracked[1], "a step that is left out is no good step of the loss scale either"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("kind", "way", "options"),
    [
        ("adamw", "plain", {}),
        ("adamw", "clip", {}),
        ("momentum", "clip and step", {}),
        ("adamw", "plain", {"fused": True}),
        ("adamw", "clip and step", {"fused": True, "amsgrad": True}),
        ("adagrad", "plain", {}),
        ("adagrad", "clip and step", {}),
        ("adagrad", "closure", {}),
        ("momentum", "closure", {}),
        ("momentum", "accumulation", {"micro": 3}),
    ],
)
def test_a_run_with_a_spike_equals_to_the_bit_one_whose_bad_step_was_left_out(kind, way, options, scale):
    rule = Spike(**RULE)
    spiked, verdicts = run(rule, scale, kind=kind, way=way, **options)
    other, quiet = run(rule, scale, kind=kind, way=way, planted=False, **options)
    assert [place for place, verdict in enumerate(verdicts) if verdict != "landed"] == [PLANTED]
    assert verdicts[PLANTED] == "spike"
    assert set(quiet) == {"landed"}
    same(spiked, other)


def test_without_on_spike_the_spike_goes_into_the_weights():
    spiked, verdicts = run(None)
    other, _ = run(None, planted=False)
    assert set(verdicts) == {"landed"}
    assert not torch.equal(spiked.params[0], other.params[0])


def test_without_a_spike_every_bit_is_that_of_a_run_without_on_spike():
    for action in ("skip", "clip", "raise"):
        for way in ("plain", "clip and step"):
            watched, _ = run(Spike(action=action, **RULE), 2.0**10, factor=1.0, way=way)
            other, _ = run(None, 2.0**10, factor=1.0, way=way)
            same(watched, other)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("kind", "way", "options"),
    [
        ("sgd", "plain", {}),
        ("sgd", "clip", {}),
        ("sgd", "clip and step", {}),
        ("sgd", "plain", {"fused": True}),
        ("maximize", "clip and step", {}),
    ],
)
def test_a_clipped_spike_moves_the_weights_as_far_as_the_running_norm_does(kind, way, options, scale):
    training = Run(kind, scaler=scaler_of(scale, on_spike=Spike(action="clip", **RULE)), **options)
    training.optimizer.param_groups[0].update(weight_decay=0.0, lr=1.0)
    norms = []
    for seed in range(PLANTED + 1):
        before = [p.detach().clone() for p in training.params]
        training.backward(seed, 40.0 if seed == PLANTED else 1.0)
        if way == "clip":
            training.scaler.clip_grad_norm_(training.optimizer, 1e4)
        if way == "clip and step":
            training.scaler.clip_and_step(training.optimizer, 1e4)
        else:
            training.scaler.step(training.optimizer)
        training.scaler.update()
        norms.append(training.scaler.last_step(training.optimizer).norm.item())
    last = training.scaler.last_step(training.optimizer)
    moved = torch.cat([(p - b).flatten() for p, b in zip(training.params, before, strict=True)]).norm().item()
    first = RULE["window"]
    mean = sum(norms[:first]) / first
    for norm in norms[first:PLANTED]:
        mean += (norm - mean) / first
    assert (last.verdict, last.skipped) == ("spike", False)
    assert moved == pytest.approx(mean, rel=1e-4)
    assert last.clipped_norm.item() == pytest.approx(mean, rel=1e-4)


def test_the_tighter_of_two_clips_counts():
    for max_norm, expected in ((1.0, 1.0), (1e4, None)):
        training = Run("sgd", scaler=scaler_of(None, on_spike=Spike(action="clip", **RULE)), lr=1.0)
        for seed in range(PLANTED + 1):
            before = [p.detach().clone() for p in training.params]
            training.backward(seed, 40.0 if seed == PLANTED else 1.0)
            training.scaler.clip_and_step(training.optimizer, max_norm)
        moved = torch.cat([(p - b).flatten() for p, b in zip(training.params, before, strict=True)]).norm()
        assert moved.item() == pytest.approx(expected or moved.item(), rel=1e-4)
        assert moved.item() < 15


@pytest.mark.parametrize("scale", SCALES)
def test_raise_leaves_the_weights_and_the_next_step_is_judged_again(scale):
    training = Run(scaler=scaler_of(scale, on_spike=Spike(action="raise", **RULE)))
    for seed in range(PLANTED):
        training.backward(seed)
        training.scaler.step(training.optimizer)
        training.scaler.update()
    before = everything(_Params(training), training.optimizer)
    training.backward(PLANTED, 40.0)
    with pytest.raises(SpikeError, match="the norm of this step") as caught:
        training.scaler.step(training.optimizer)
    now = everything(_Params(training), training.optimizer)
    assert all(map(torch.equal, before[0], now[0]))
    assert all(map(torch.equal, before[1], now[1]))
    assert caught.value.value > 200 > caught.value.limit
    assert (caught.value.kind, caught.value.of) == ("AdamW", "norm")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    training.backward(PLANTED + 1)
    training.scaler.step(training.optimizer)
    assert training.scaler.last_step(training.optimizer).verdict == "landed"


class _Params:
    def __init__(self, run):
        self._params = run.params

    def parameters(self):
        return self._params


class Failing(torch.optim.SGD):
    """An optimizer that may use gradients before its closure, and whose step may fail."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise KeyError("no step")
        return super().step(closure)


def test_the_verdict_of_a_step_that_failed_is_not_that_of_the_next_one():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Failing([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, on_spike=Spike(window=4, warmup=2, action="clip"))
    for factor in (1.0, 1.0, 1.0, 100.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        optimizer.fails = factor > 1.0
        if not optimizer.fails:
            scaler.step(optimizer)
            scaler.update()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    optimizer.fails = False
    optimizer.zero_grad()
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer, weight.sum)
    assert scaler.last_step(optimizer).verdict == "overflow"
    assert not scaler.last_step(optimizer).is_left_out


def test_each_optimizer_has_statistics_of_its_own():
    """The second optimizer's gradients are a thousand times larger, and only its own spike counts as one."""
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=1e-6) for w in weights]
    scaler = GradScaler("cpu", enabled=False, on_spike=Spike(**RULE))
    told = []
    for seed in range(12):
        noise = torch.rand(8, generator=torch.Generator().manual_seed(seed)) + 0.5
        for place, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            optimizer.zero_grad()
            spike = 50.0 if seed == 9 and place == 0 else 1.0
            scaler.scale((weight * noise).sum() * 1000.0**place * spike).backward()
            scaler.step(optimizer)
            told.append(scaler.last_step(optimizer).verdict)
        scaler.update()
    assert [place for place, verdict in enumerate(told) if verdict == "spike"] == [18]


@pytest.mark.parametrize("scale", SCALES)
def test_a_spike_of_the_loss(scale):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    scaler = scaler_of(scale, on_spike={"of": "loss", "window": 8, "warmup": 4})
    told = []
    for step in range(10):
        optimizer.zero_grad()
        for half in (0.5, 0.25):  # losses of micro-batches are added
            shift = 9.0 if step == 7 else 0.01 * (step % 3)
            scaler.scale((weight.sum() * 0.1 + shift) * half).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append(scaler.last_step(optimizer).verdict)
    assert told == ["spike" if step == 7 else "landed" for step in range(10)]
    assert scaler.last_step(optimizer).judged[3].item() == pytest.approx(0.3, abs=0.1)


def test_a_step_of_which_no_loss_was_seen_is_an_error_that_names_the_call():
    scaler = GradScaler("cpu", enabled=False, on_spike=Spike(of="loss"))
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"no loss was seen.*scaler.scale\(loss\).backward\(\)"):
        scaler.step(optimizer)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_resumed_run_judges_as_the_whole_one(enabled):
    rule = Spike(**RULE)

    def steps(scaler, training, seeds):
        told = []
        for seed in seeds:
            training.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed)
            factor = 5.0 if seed == 10 else 1.0
            loss = (
                sum((p * torch.randn(p.shape, generator=generator)).sum() for p in training.params) * factor
            )
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            told.append(scaler.last_step(training.optimizer).verdict)
        return told

    def fresh():
        return GradScaler("cpu", init_scale=8.0, enabled=enabled, on_spike=rule)

    whole, training = fresh(), Run("sgd")
    told = steps(whole, training, range(8))
    saved, copied, pickled = whole.state_dict(), copy.deepcopy(whole), pickle.dumps(whole)
    told += steps(whole, training, range(8, 12))
    assert told[10] == "spike"
    resumed = fresh()
    resumed.load_state_dict(copy.deepcopy(saved))
    for scaler in (resumed, copied, pickle.loads(pickled)):
        again = Run("sgd")
        assert steps(scaler, again, range(8, 12)) == told[8:]
        assert scaler.state_dict() == whole.state_dict()
    if enabled:
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(saved)
        assert theirs.get_scale() == whole.get_scale()
        resumed.load_state_dict(theirs.state_dict())
        assert steps(resumed, Run("sgd"), [1]) == ["landed"]
    else:
        torch.amp.GradScaler("cpu", enabled=False).load_state_dict(saved)


def test_a_new_level_is_learned_and_an_overflow_teaches_nothing():
    scaler = GradScaler("cpu", enabled=False, on_spike=Spike(window=32))
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    told = []
    for step in range(120):
        noise = torch.rand(8, generator=torch.Generator().manual_seed(step)) + 0.5
        optimizer.zero_grad()
        (weight * noise).sum().mul(10.0 if step >= 40 else math.nan if step == 20 else 1.0).backward()
        scaler.step(optimizer)
        told.append(scaler.last_step(optimizer).verdict)
    assert told[20] == "nan"
    spikes = [step for step, verdict in enumerate(told) if verdict == "spike"]
    assert spikes[0] == 40
    assert spikes[-1] < 80, "ten times the norm is the new level"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("jump", "on_spike='jump'"),
        ({"sigma": 0}, "sigma"),
        ({"window": 1}, "window"),
        ({"window": 8, "warmup": 9}, "warmup"),
        ({"of": "loss", "action": "clip"}, "action"),
        ({"off": "loss"}, "off"),
        (3.0, "on_spike=3.0"),
    ],
)
def test_an_option_that_is_not_allowed_is_named(given, named):
    with pytest.raises(OptionError, match=named):
        GradScaler("cpu", on_spike=given)


def test_nothing_can_be_judged_where_nothing_is_measured():
    with pytest.raises(OptionError, match="on_nonfinite"):
        GradScaler("cpu", on_spike="skip", on_nonfinite="ignore")


def test_fifty_skipped_spikes_are_told_as_spikes():
    scaler = GradScaler("cpu", enabled=False, on_spike=Spike(sigma=2.0, window=4096, warmup=3))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def steps(count, factor):
        for _ in range(count):
            optimizer.zero_grad()
            (weight.sum() * factor).backward()
            scaler.step(optimizer)

    steps(2000, 1.0)
    with pytest.warns(UserWarning, match="50 steps of SGD in a row were skipped, the last one as a spike"):
        steps(50, 100.0)


@pytest.mark.parametrize("of", ["norm", "loss"])
@pytest.mark.parametrize(("share", "verdict"), [(0.95, "landed"), (1.05, "spike")])
def test_what_hardly_varies_has_a_least_limit(of, share, verdict):
    """A norm is a spike from 4 times the mean on, and a loss from sigma percent above it, however steady it was."""
    limit = 4.0 if of == "norm" else 1.06
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = (
        torch.optim.SGD([weight], lr=0.0),
        scaler_of(2.0**10, on_spike=Spike(of=of, sigma=6.0, **RULE)),
    )
    for factor in (*[1.0] * PLANTED, share * limit):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step(optimizer).verdict == verdict
