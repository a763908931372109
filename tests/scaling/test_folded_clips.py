"""Clips that are left to the step: one read of the gradients, and what a clip in place gives."""

import copy
import math

import pytest
import torch

from tests.scaling.ops_seen import OpsSeen
from tests.scaling.runs import SCALES, Run, scaler_of

pytestmark = pytest.mark.native


@pytest.fixture(params=SCALES)
def pair(request):
    """Makes two alike runs: one may step in one pass, the other may not."""
    return lambda kind: [Run(kind, scaler=scaler_of(request.param, one_pass=on)) for on in (True, False)]


@pytest.mark.parametrize("trusted", [False, True])
def test_a_folded_clip_is_a_clip(pair, trusted):
    ours, theirs = pair("adamw")
    for seed in range(4):
        norm, result = ours.clip_and_step(seed, trusted=trusted)
        right, other = theirs.clip_and_step(seed, fold=False)
        assert (result.one_pass, other.one_pass) == (seed > 0, False)  # the first step makes the state
        torch.testing.assert_close([norm, result.norm], [right, other.norm], rtol=1e-6, atol=0)
    for mine, their in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fold", [False, True])
def test_gradients_are_read_once_for_a_clip_and_once_by_the_step(pair, fold):
    run, _ = pair("sgd")
    run.backward()
    with OpsSeen() as seen:
        run.scaler.clip_grad_norm_(run.optimizer, 0.1, fold=fold)
        run.scaler.assume_unchanged(run.optimizer)
        run.scaler.step(run.optimizer)
    passes = [name for name in seen.names if name in {"norm_check", "unscale_", "multiply_", "sgd_"}]
    if fold:
        assert passes == ["norm_check", "sgd_"]
    else:
        assert passes == ["unscale_" if run.scaler.is_enabled() else "norm_check", "multiply_", "sgd_"]


def test_ensure_unscaled_writes_a_folded_clip_once(pair):
    run, _ = pair("sgd")
    run.backward()
    before = [grad / run.scaler.get_scale() for grad in run.gradients()]
    norm = run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    for _ in range(2):
        run.scaler.ensure_unscaled(run.optimizer)
        for grad, raw in zip(run.gradients(), before, strict=True):
            torch.testing.assert_close(grad, raw * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_not_finite_changes_nothing_and_is_named(pair, value, trusted):
    run, _ = pair("adamw")
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
    assert (report.nan or report.inf) == ("param_groups[0]['params'][1]",)
    assert all(map(torch.equal, run.values(), before))
    assert str(run.optimizer.state_dict()) == str(state)
    left = run.gradients()
    run.scaler.ensure_unscaled(run.optimizer)
    torch.testing.assert_close(run.gradients(), left, rtol=0, atol=0, equal_nan=True)


def test_what_the_gradients_are_at_the_step_is_clipped(pair):
    """Written to unseen after the clip: found, and clipped by the norm that it then has."""
    run, _ = pair("sgd")
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    before = run.values()
    for param in run.params:
        param.grad.data.mul_(100.0)
    run.scaler.step(run.optimizer)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, run.values(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-5)
    run.scaler.update()
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.params[0].grad.data[0, 0] = math.nan
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).skipped


@pytest.mark.parametrize("edit", [lambda grad: grad.mul_(2.0), lambda grad: grad * 2.0])
def test_a_change_that_is_seen_is_an_error(pair, edit):
    run, _ = pair("sgd")
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.params[0].grad = edit(run.params[0].grad)
    text = (
        r"gradients were changed between clip_grad_norm_\(\.\.\., fold=True\) and step\(\).*not clipped then"
    )
    with pytest.raises(RuntimeError, match=text):
        run.scaler.step(run.optimizer)
    run.backward()  # the batch was dropped
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.scaler.step(run.optimizer)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_batch_may_be_dropped_and_clipped_again(pair, set_to_none):
    run, _ = pair("sgd")
    run.backward()
    run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
    run.optimizer.zero_grad(set_to_none=set_to_none)
    assert run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True) == 0
    run.scaler.step(run.optimizer)
    assert not run.scaler.last_step(run.optimizer).skipped


def test_several_clips_follow_each_other(pair):
    ours, theirs = pair("sgd")
    for run in (ours, theirs):
        run.backward()
        for max_norm, order in ((2.0, 2.0), (0.5, math.inf), (0.1, 1.0)):
            run.scaler.clip_grad_norm_(run.optimizer, max_norm, order, fold=True)
        run.scaler.step(run.optimizer)
    assert ours.scaler.last_step(ours.optimizer).one_pass
    for mine, right in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("then", ["by norm", "by value", "by parameters", "ensure_unscaled"])
def test_a_folded_clip_is_written_before_gradients_are_needed(pair, then):
    ours, theirs = pair("sgd")
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
    torch.testing.assert_close(ours.gradients(), theirs.gradients(), rtol=1e-6, atol=0)


class Quiet(torch.optim.SGD):
    """A subclass, which steps by itself."""


@pytest.mark.parametrize("reason", ["subclass", "argument", "first step", "closure and argument"])
def test_other_steps_see_clipped_gradients(pair, reason):
    run, _ = pair("momentum" if reason == "first step" else "sgd")
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
    assert torch.cat([grad.flatten() for grad in run.gradients()]).norm().item() == pytest.approx(
        0.5, rel=1e-5
    )


def test_no_gradients_at_all(pair):
    run, _ = pair("sgd")
    run.scaler.scale(torch.ones(()))
    assert run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True) == 0
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).not_one_pass_because == "it has no gradients"
