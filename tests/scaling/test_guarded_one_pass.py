"""Steps in one pass where nothing is scaled: the guard's check, a clip left to the step, one read."""

import copy
import math

import pytest
import torch

from amp_plugin import GradScaler, store_weights
from tests.scaling.ops_seen import OpsSeen
from tests.scaling.test_one_pass import KINDS, Run, ulps

pytestmark = pytest.mark.native


def run_of(kind="adamw", *, one_pass=True, **options):
    return Run(kind, scaler=GradScaler("cpu", enabled=False, one_pass=one_pass), **options)


def clip_and_step(run, seed=0, max_norm=0.5, *, fold=True, trusted=False):
    run.backward(seed)
    norm = run.scaler.clip_grad_norm_(run.optimizer, max_norm, fold=fold)
    if trusted:
        run.scaler.assume_unchanged(run.optimizer)
    run.scaler.step(run.optimizer)
    return norm, run.scaler.last_step(run.optimizer)


def gradients(run):
    return [param.grad.clone() for param in run.params]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_step_is_torchs_to_the_last_bit(kind, flags):
    run = run_of(kind, **flags)
    run.step()
    for seed in range(3):
        theirs = run_of(kind, one_pass=False, fused=True)
        theirs.params, theirs.optimizer = copy.deepcopy((run.params, run.optimizer))
        for group in theirs.optimizer.param_groups:
            group["fused"], group["foreach"] = True, None
        assert run.step(seed).one_pass
        assert theirs.step(seed).not_one_pass_because == "one_pass=False"
        assert ulps(run.values(), theirs.values(), of_largest=kind == "momentum") <= 1.0


@pytest.mark.parametrize("trusted", [False, True])
def test_a_folded_clip_is_a_clip(trusted):
    ours, theirs = run_of(lr=0.1), run_of(lr=0.1, one_pass=False)
    for seed in range(4):
        norm, result = clip_and_step(ours, seed, trusted=trusted)
        right, other = clip_and_step(theirs, seed, fold=False)
        assert (result.one_pass, other.one_pass) == (seed > 0, False)  # the first step makes the state
        torch.testing.assert_close([norm, result.norm], [right, other.norm], rtol=1e-6, atol=0)
    for mine, their in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fold", [False, True])
def test_gradients_are_read_once_for_a_clip_and_once_by_the_step(fold):
    run = run_of("sgd")
    run.backward()
    with OpsSeen() as seen:
        run.scaler.clip_grad_norm_(run.optimizer, 0.1, fold=fold)
        run.scaler.assume_unchanged(run.optimizer)
        run.scaler.step(run.optimizer)
    passes = [name for name in seen.names if name in {"norm_check", "unscale_", "multiply_", "sgd_"}]
    assert passes == (["norm_check", "sgd_"] if fold else ["norm_check", "multiply_", "sgd_"])


def test_ensure_unscaled_writes_a_folded_clip_once():
    run = run_of("sgd")
    run.backward()
    before = gradients(run)
    norm = run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    for _ in range(2):
        run.scaler.ensure_unscaled(run.optimizer)
        for grad, raw in zip(gradients(run), before, strict=True):
            torch.testing.assert_close(grad, raw * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_not_finite_changes_nothing_and_is_named(value, trusted):
    run = run_of()
    run.step()
    before, state = run.values(), copy.deepcopy(run.optimizer.state_dict())
    run.backward()
    run.params[1].grad.data[3] = value
    run.scaler.clip_grad_norm_(run.optimizer, 0.1, fold=True)
    if trusted:
        run.scaler.assume_unchanged(run.optimizer)
    run.scaler.step(run.optimizer)
    result = run.scaler.last_step(run.optimizer)
    assert (result.skipped, result.one_pass) == (True, True)
    report = result.overflow_report()
    assert (report.nan or report.inf) == ("group 0[1]",)
    assert all(map(torch.equal, run.values(), before))
    assert str(run.optimizer.state_dict()) == str(state)
    raw = gradients(run)
    run.scaler.ensure_unscaled(run.optimizer)
    torch.testing.assert_close(gradients(run), raw, rtol=0, atol=0, equal_nan=True)


def test_what_the_gradients_are_at_the_step_is_clipped():
    """Written to unseen after the clip: found, and clipped by the norm that it then has."""
    run = run_of("sgd")
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    before = run.values()
    for param in run.params:
        param.grad.data.mul_(100.0)
    run.scaler.step(run.optimizer)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, run.values(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-5)
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.params[0].grad.data[0, 0] = math.nan
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).skipped


def test_a_change_that_is_seen_is_an_error():
    run = run_of("sgd")
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.params[0].grad.mul_(2.0)
    text = (
        r"gradients were changed between clip_grad_norm_\(\.\.\., fold=True\) and step\(\).*not clipped then"
    )
    with pytest.raises(RuntimeError, match=text):
        run.scaler.step(run.optimizer)
    with pytest.raises(RuntimeError, match=text):
        run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.backward()  # the batch was dropped
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.scaler.step(run.optimizer)


def test_several_clips_follow_each_other():
    ours, theirs = run_of("sgd"), run_of("sgd", one_pass=False)
    for run in (ours, theirs):
        run.backward()
        for max_norm, order in ((2.0, 2.0), (0.5, math.inf), (0.1, 1.0)):
            run.scaler.clip_grad_norm_(run.optimizer, max_norm, order, fold=True)
        run.scaler.step(run.optimizer)
    assert ours.scaler.last_step(ours.optimizer).one_pass
    for mine, right in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("then", ["by norm", "by value", "by parameters", "ensure_unscaled"])
def test_a_folded_clip_is_written_before_gradients_are_needed(then):
    ours, theirs = run_of("sgd"), run_of("sgd", one_pass=False)
    for run in (ours, theirs):
        run.backward()
        run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
        if then == "by norm":
            run.scaler.clip_grad_norm_(run.optimizer, 0.1)
        elif then == "by parameters":
            run.scaler.clip_grad_norm_(run.params, 0.1, fold=True)
        elif then == "by value":
            run.scaler.clip_grad_value_(run.optimizer, 0.05)
        else:
            run.scaler.ensure_unscaled(run.optimizer)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)


class Quiet(torch.optim.SGD):
    """A subclass, which steps by itself."""


@pytest.mark.parametrize("reason", ["subclass", "argument", "first step", "closure and argument"])
def test_other_steps_see_clipped_gradients(reason):
    run = run_of("momentum" if reason == "first step" else "sgd")
    if reason == "subclass":
        run.optimizer = Quiet(run.params, lr=0.1)
    run.backward()
    run.optimizer.zero_grad = lambda: None

    def closure():
        return run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)

    if "closure" in reason:
        run.optimizer.step = lambda closure, extra: closure()
        run.scaler.step(run.optimizer, closure, 1)
    else:
        closure()
        run.scaler.step(run.optimizer, **({"closure": None} if reason == "argument" else {}))
    assert not run.scaler.last_step(run.optimizer).one_pass
    assert torch.cat([grad.flatten() for grad in gradients(run)]).norm().item() == pytest.approx(
        0.5, rel=1e-5
    )


@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_closures_of_known_optimizers_run_before_the_step(poison):
    run = run_of()
    run.step()
    before = run.values()

    def closure():
        run.optimizer.zero_grad()
        loss = sum(param.sum() for param in run.params) * poison
        assert torch.is_grad_enabled()
        loss.backward()
        run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
        return loss

    with torch.no_grad():
        loss = run.scaler.step(run.optimizer, closure)
    result = run.scaler.last_step(run.optimizer)
    assert (result.one_pass, result.skipped) == (True, math.isnan(poison))
    assert torch.equal(loss, loss) is not math.isnan(poison)
    assert all(map(torch.equal, before, run.values())) is math.isnan(poison)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"one_pass": False}, "one_pass=False"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' takes torch's own step"),
    ],
)
def test_options_leave_the_step_to_torch(options, text):
    run = Run("sgd", scaler=GradScaler("cpu", enabled=False, **options))
    _, result = clip_and_step(run)
    assert result.not_one_pass_because == text
    assert torch.cat([grad.flatten() for grad in gradients(run)]).norm().item() == pytest.approx(
        0.5, rel=1e-5
    )


def test_a_norm_too_large_for_float32_makes_zeros_as_torchs():
    run = run_of("sgd")
    run.backward()
    for param in run.params:
        param.grad.fill_(3e38)
    before = run.values()
    assert run.scaler.clip_grad_norm_(run.optimizer, 1.0, fold=True).isinf()
    run.scaler.step(run.optimizer)
    assert not run.scaler.last_step(run.optimizer).skipped
    assert all(map(torch.equal, run.values(), before))


def test_no_gradients_at_all():
    run = run_of("sgd")
    assert run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True) == 0
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).not_one_pass_because == "it has no gradients"


def test_stored_weights_alone_are_stepped_without_any_scale():
    """The op is called for them alone: for no tensors at all nothing would tell it the device."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store_weights(model, optimizer, weights="bf16")
    scaler = GradScaler("cpu", enabled=False)
    for taken in (False, True, True):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 8)).sum().backward()
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).one_pass is taken
        assert not torch.equal(model.weight, before)
