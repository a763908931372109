"""Clips that are left to the step: one read of the gradients, and what a clip in place gives."""

import math

import pytest
import torch

from tests.scaling.ops_seen import OpsSeen
from tests.scaling.runs import SCALES, Run, scaler_of

pytestmark = pytest.mark.native


@pytest.fixture(params=SCALES)
def pair(request):
    """Makes two alike runs: one may step in one pass, the other may not."""
    return lambda kind="sgd": [
        Run(kind, scaler=scaler_of(request.param, one_pass=on)) for on in (True, False)
    ]


@pytest.fixture
def run(pair):
    return pair()[0]


def fold(run, max_norm=0.5, norm_type=2.0):
    return run.scaler.clip_grad_norm_(run.optimizer, max_norm, norm_type, fold=True)


def finish(run):
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return run.scaler.last_step(run.optimizer)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_folded_clip_is_a_clip(pair, trusted):
    ours, theirs = pair("adamw")
    for seed in range(4):
        norm, result = ours.clip_and_step(seed, trusted=trusted)
        right, other = theirs.clip_and_step(seed, fold=False)
        assert (result.one_pass, other.one_pass) == (seed > 0, False)  # the first step makes the state
        torch.testing.assert_close([norm, result.norm], [right, other.norm], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fold", [False, True])
def test_gradients_are_read_once_for_a_clip_and_once_by_the_step(run, fold):
    with OpsSeen() as seen:
        run.clip_and_step(max_norm=0.1, fold=fold, trusted=True)
    passes = [name for name in seen.names if name in {"norm_check", "unscale_", "multiply_", "step_"}]
    written = ["unscale_" if run.scaler.is_enabled() else "norm_check", "multiply_"]
    assert passes == [*(["norm_check"] if fold else written), "step_"]


def test_what_the_gradients_are_at_the_step_is_clipped(run):
    """Written to unseen after the clip: found, and clipped by the norm that it then has."""
    run.backward()
    fold(run)
    before = run.values()
    for param in run.params:
        param.grad.data.mul_(100.0)
    finish(run)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, run.values(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 0.5, rel=1e-5)
    run.backward()
    fold(run)
    run.params[0].grad.data[0, 0] = math.nan
    assert finish(run).skipped


@pytest.mark.parametrize("edit", [lambda grad: grad.mul_(2.0), lambda grad: grad * 2.0])
def test_a_change_that_is_seen_is_an_error(run, edit):
    run.backward()
    fold(run)
    run.params[0].grad = edit(run.params[0].grad)
    text = r"changed between clip_grad_norm_\(\.\.\., fold=True\) and step\(\).*with fold=False"
    with pytest.raises(RuntimeError, match=text):
        run.scaler.step(run.optimizer)
    run.clip_and_step()  # the batch was dropped


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_batch_may_be_dropped_and_clipped_again(run, set_to_none):
    run.backward()
    fold(run)
    run.optimizer.zero_grad(set_to_none=set_to_none)
    assert fold(run) == 0
    assert not finish(run).skipped


def test_several_clips_follow_each_other(pair):
    ours, theirs = pair()
    for run in (ours, theirs):
        run.backward()
        for max_norm, order in ((2.0, 2.0), (0.5, math.inf), (0.1, 1.0)):
            fold(run, max_norm, order)
        finish(run)
    assert ours.scaler.last_step(ours.optimizer).one_pass
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-6, atol=1e-7)


THEN = {
    "by norm": lambda run: run.scaler.clip_grad_norm_(run.optimizer, 0.1),
    "by parameters": lambda run: run.scaler.clip_grad_norm_(run.params, 0.1, fold=True),
    "by value": lambda run: run.scaler.clip_grad_value_(run.optimizer, 0.05),
    "ensure_unscaled": lambda run: run.scaler.ensure_unscaled(run.optimizer),
    "twice": lambda run: [run.scaler.ensure_unscaled(run.optimizer) for _ in range(2)],
}


@pytest.mark.parametrize("then", THEN)
def test_a_folded_clip_is_written_before_gradients_are_needed(pair, then):
    ours, theirs = pair()
    for run in (ours, theirs):
        run.backward()
        fold(run)
        THEN[then](run)
    torch.testing.assert_close(ours.gradients(), theirs.gradients(), rtol=1e-6, atol=0)
    if then in {"ensure_unscaled", "twice"}:
        assert torch.nn.utils.get_total_norm(ours.gradients()).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("reason", ["subclass", "argument", "first step", "closure and argument"])
def test_other_steps_see_clipped_gradients(pair, reason):
    run, _ = pair("momentum" if reason == "first step" else "sgd")
    if reason == "subclass":
        run.optimizer = type("Quiet", (torch.optim.SGD,), {})(run.params, lr=0.1)
    run.backward()
    run.optimizer.zero_grad = lambda: None
    if "closure" in reason:
        run.optimizer.step = lambda closure, extra: closure()
        run.scaler.step(run.optimizer, lambda: fold(run), 1)
    else:
        fold(run)
        run.scaler.step(run.optimizer, **({"closure": None} if reason == "argument" else {}))
    assert not run.scaler.last_step(run.optimizer).one_pass
    assert torch.nn.utils.get_total_norm(run.gradients()).item() == pytest.approx(0.5, rel=1e-5)


def test_no_gradients_at_all(run):
    run.scaler.scale(torch.ones(()))
    assert fold(run) == 0
    assert finish(run).not_one_pass_because == "it has no gradients"
