"""The guard: without a loss scale too, a step with a gradient that is not finite changes nothing."""

import copy
import math
import pickle

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import closures
from tests.scaling.ops_seen import OpsSeen
from tests.scaling.test_skipping import OPTIMIZERS, build, everything

BATCHES, POISONED = 20, 7


def guarded(**options):
    return GradScaler("cpu", enabled=False, **options)


def train(scaler, cls, options, poison=None, clip=None, drop=False):
    """Twenty batches, one of them poisoned or dropped; return all numbers and the results of the steps."""
    model, optimizer = build(cls, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(1)
    results = []
    for i in range(BATCHES):
        x = torch.randn(2, 4, generator=generator)
        if i == POISONED:
            if drop:
                continue
            x = x * poison
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
        results.append(scaler.last_step(optimizer))
        if not results[-1].skipped:
            schedule.step()
    return everything(model, optimizer), results


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_poisoned_batch_leaves_what_a_dropped_one_leaves(cls, options, clip):
    (params, state), results = train(guarded(), cls, options, poison=math.nan, clip=clip)
    (other_params, other_state), _ = train(guarded(), cls, options, clip=clip, drop=True)
    assert all(map(torch.equal, params + state, other_params + other_state))
    assert all(param.isfinite().all() for param in params)
    assert [result.skipped for result in results] == [i == POISONED for i in range(BATCHES)]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_without_poison_every_bit_is_torchs(clip):
    ours, _ = train(guarded(one_pass=False), torch.optim.AdamW, {"fused": True}, poison=1.0, clip=clip)
    theirs, _ = train(
        guarded(on_nonfinite="ignore"), torch.optim.AdamW, {"fused": True}, poison=1.0, clip=clip
    )
    assert all(map(torch.equal, ours[0] + ours[1], theirs[0] + theirs[1]))


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_skip_is_told_and_counted(weights, poison):
    one = weights()
    scaler = guarded()
    scaler.register(one.optimizer)
    one.loss(2.0).backward()
    one.params[1].grad[2] = poison
    assert scaler.step(one.optimizer) is None
    result = scaler.last_step(one.optimizer)
    assert (result.skipped, result.skipped_if_known(), result.found_inf.item()) == (True, True, 1.0)
    assert (result.scale_before, result.scale_after) == (1.0, 1.0)
    report = result.overflow_report()
    assert (report.nan if math.isnan(poison) else report.inf) == ("group 0[1]",)
    assert scaler.skipped_steps() == scaler.skipped_steps(one.optimizer) == 1
    assert one.value == 0.0
    one.optimizer.zero_grad()
    one.loss(2.0).backward()
    scaler.step(one.optimizer)
    assert (one.value, scaler.skipped_steps()) == (-2.0, 1)
    assert scaler.last_step(one.optimizer).norm.item() == pytest.approx(2.0 * 12**0.5)
    assert copy.deepcopy(scaler).skipped_steps() == pickle.loads(pickle.dumps(scaler)).skipped_steps() == 1


def test_what_the_gradients_are_at_the_step_counts(weights):
    """Who mends them after a clip has seen them is stepped for, as without a guard."""
    one, scaler = weights(), guarded()
    one.loss(math.nan).backward()
    scaler.clip_grad_norm_(one.optimizer, 1.0)
    for param in one.params:
        param.grad.data.nan_to_num_(1.0)
    scaler.step(one.optimizer)
    assert (one.value, scaler.last_step(one.optimizer).skipped) == (-1.0, False)
    one.optimizer.zero_grad()
    one.loss(1.0).backward()
    scaler.clip_grad_norm_(one.optimizer, 100.0)
    one.params[0].grad.data[0] = math.nan
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).skipped


def test_what_a_clip_has_measured_is_not_read_again(weights):
    one, scaler = weights(), guarded()

    def step(gradient):
        one.optimizer.zero_grad()
        one.loss(gradient).backward()
        with OpsSeen() as seen:
            scaler.clip_grad_norm_(one.optimizer, 1.0)
            scaler.assume_unchanged(one.optimizer)
            scaler.step(one.optimizer)
        assert seen.names.count("norm_check") == 1
        return scaler.last_step(one.optimizer)

    assert not step(1.0).skipped
    assert step(math.nan).overflow_report().nan == tuple(f"group 0[{i}]" for i in range(3))
    assert not step(1e30).skipped  # squares overflow float32, the norm does not
    assert one.value == pytest.approx(-2 * 12**-0.5)


@pytest.mark.parametrize("order", [0.0, -1.0])
def test_orders_whose_norm_hides_a_nan_are_read(weights, order):
    one, scaler = weights(), guarded()
    one.loss(1.0).backward()
    one.params[0].grad[0] = math.inf
    scaler.clip_grad_norm_(one.optimizer, 1e9, order)
    scaler.assume_unchanged(one.optimizer)
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).skipped


def test_raise_names_the_parameters_and_leaves_the_weights(weights):
    one, scaler = weights(), guarded(on_nonfinite="raise")
    scaler.register(one.optimizer, names={"a.weight": one.params[0]})
    (one.params[0].sum() * math.nan).backward()
    with pytest.raises(
        FloatingPointError, match=r"SGD: gradients are not finite \(nan in 1 gradient: a\.weight"
    ):
        scaler.step(one.optimizer)
    assert one.value == 0.0
    assert scaler.last_step(one.optimizer).skipped


def test_raise_waits_for_the_loss_scale(weights):
    """Overflows at a scale above 1 are how a scale is found."""
    one, scaler = weights(), GradScaler("cpu", init_scale=4.0, on_nonfinite="raise")

    def step():
        one.optimizer.zero_grad()
        scaler.scale(one.loss(math.inf)).backward()
        scaler.step(one.optimizer)
        scaler.update()

    step(), step()
    with pytest.raises(FloatingPointError, match=r"are not finite \(inf in 3 gradients.*'skip' goes on"):
        step()
    constant = GradScaler("cpu", init_scale=4.0, dynamic=False, on_nonfinite="raise")
    constant.scale(one.loss(math.inf)).backward()
    with pytest.raises(FloatingPointError, match=r"are not finite at a loss scale of 4 \(inf"):
        constant.step(one.optimizer)


def test_ignore_is_torchs_step(weights):
    one, scaler = weights(), guarded(on_nonfinite="ignore")
    one.loss(math.nan).backward()
    scaler.step(one.optimizer)
    assert all(param.isnan().all() for param in one.params)
    assert (scaler.last_step(one.optimizer).skipped, scaler.skipped_steps()) == (False, 0)
    assert GradScaler("cpu", on_nonfinite="ignore").is_enabled()


def test_a_wrong_word_is_refused():
    with pytest.raises(ValueError, match="on_nonfinite='stop' is not known; use 'skip', 'raise' or 'ignore'"):
        GradScaler("cpu", on_nonfinite="stop")


def test_optimizers_decide_each_for_itself(weights):
    one, other, scaler = weights(), weights(), guarded()
    (one.loss(1.0) + other.loss(math.nan)).backward()
    scaler.step(one.optimizer)
    scaler.step(other.optimizer)
    assert (one.value, other.value) == (-1.0, 0.0)
    assert [scaler.skipped_steps(model.optimizer) for model in (one, other)] == [0, 1]


def test_an_optimizer_without_gradients_steps(weights):
    one, scaler = weights(), guarded()
    assert scaler.step(one.optimizer) is None
    result = scaler.last_step(one.optimizer)
    assert (result.skipped, result.norm, str(result.overflow_report())) == (False, None, "no overflow")


def test_sparse_and_complex_gradients_and_the_fallback(weights, without_native):
    table = torch.nn.Embedding(4, 2, sparse=True)
    wave = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([*table.parameters(), wave], lr=1.0), guarded()
    for poison, skipped in ((1.0, False), (math.nan, True)):
        optimizer.zero_grad()
        (table(torch.tensor([1, 1])).sum() * poison + wave.sum().abs()).backward()
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).skipped is skipped


def test_a_run_that_only_skips_says_so_once(weights):
    one, scaler = weights(), guarded()

    def step():
        one.optimizer.zero_grad()
        one.loss(math.nan).backward()
        scaler.step(one.optimizer)

    for _ in range(49):
        step()
    with pytest.warns(
        UserWarning, match=r"50 steps of SGD in a row were skipped.*although nothing is scaled"
    ):
        step()
    for _ in range(60):
        step()


def test_whatever_has_a_step_passes():
    class Engine:
        def step(self, *args):
            return args

    assert guarded().step(Engine(), 1, 2) == (1, 2)


# -- on a device ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_fused_step_skips_on_the_device(clip, with_closure):
    params = [torch.nn.Parameter(torch.zeros(4, device="cuda")) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, lr=1.0, fused=True)
    scaler = GradScaler("cuda", enabled=False)

    def backward(poison):
        optimizer.zero_grad()
        loss = sum((param * poison).sum() for param in params)
        loss.backward()
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
            scaler.assume_unchanged(optimizer)
        return loss

    def step(poison):
        poison = torch.tensor(poison, device="cuda")
        if not with_closure:
            backward(poison)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.step(optimizer, *([lambda: backward(poison)] if with_closure else []))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return scaler.last_step(optimizer)

    assert not step(1.0).skipped
    before = [param.detach().clone() for param in params]
    first = step(math.nan)
    assert first.skipped
    assert all(map(torch.equal, before, params))
    second = step(math.inf)
    assert second.skipped
    assert second.overflow_report().named is False
    assert len(second.overflow_report().inf + second.overflow_report().nan) >= 2, (
        "after a skip names are read"
    )
    assert not step(1.0).skipped
    assert scaler.skipped_steps() == 2
    assert not hasattr(optimizer, "found_inf")


# -- closures ------------------------------------------------------------------------------------


class Sam(torch.optim.SGD):
    """Climbs first, then steps from where it was: changes weights before the second call."""

    __module__ = "elsewhere"

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        before = [param.clone() for param in self.param_groups[0]["params"]]
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad)
        with torch.enable_grad():
            loss = closure()
        for param, old in zip(self.param_groups[0]["params"], before, strict=True):
            param.copy_(old)
        super().step()
        return loss


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, Sam])
@pytest.mark.parametrize("bad_call", [1, 2])
def test_a_closure_that_is_not_finite_changes_nothing(cls, bad_call):
    model, optimizer = build(cls, {})
    scaler, calls = guarded(), []
    x = torch.randn(4, 4)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x * (math.nan if len(calls) == bad else 1.0)).square().mean()
        loss.backward()
        return loss

    bad = 0
    assert isinstance(scaler.step(optimizer, closure), torch.Tensor)
    assert not scaler.last_step(optimizer).skipped
    before = everything(model, optimizer)
    calls.clear()
    bad = bad_call
    value = scaler.step(optimizer, closure=closure)
    if bad_call == 2 and cls in {torch.optim.SGD, torch.optim.Adam}:
        assert not scaler.last_step(optimizer).skipped
        return
    assert not value.isfinite()
    assert scaler.last_step(optimizer).skipped
    after = everything(model, optimizer)
    assert all(map(torch.equal, before[0] + before[1], [*after[0], *after[1]]))


def test_an_optimizer_that_calls_its_closure_first_is_copied_once(monkeypatch):
    class Foreign(torch.optim.SGD):
        __module__ = "elsewhere"

    copies, snapshot = [], closures.Snapshot
    monkeypatch.setattr(closures, "Snapshot", lambda o: copies.append(1) or snapshot(o))
    for cls, expected in ((Foreign, 1), (Sam, 3), (torch.optim.SGD, 0)):
        copies.clear()
        model, optimizer = build(cls, {})
        scaler = guarded()

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            return loss

        for _ in range(3):
            scaler.step(optimizer, closure)
        assert len(copies) == expected


def test_a_step_that_cannot_be_put_back_says_so():
    class Late(Sam):
        """As Sam from its second step on."""

        __module__ = "elsewhere"
        steps = 0

        def step(self, closure):
            self.steps += 1
            return Sam.step(self, closure) if self.steps > 1 else torch.optim.SGD.step(self, closure)

    model, optimizer = build(Late, {})
    scaler, calls = guarded(), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), math.nan if len(calls) == 3 else 1.0)).sum()
        loss.backward()
        return loss

    scaler.step(optimizer, closure)
    with pytest.raises(
        RuntimeError, match="Late: a closure's gradients are not finite after the step has changed"
    ):
        scaler.step(optimizer, closure)
