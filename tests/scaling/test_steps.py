"""The optimizer step: its result, its return value, its host syncs, and the source files that a step runs
through.
"""

import copy
import math
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.ops_seen import OpsSeen
from tests.scaling.runs import Run, scaler_of


def test_each_optimizer_decides_for_itself(weights, fused, scale):
    a, b = weights(fused=fused), weights(fused=fused)
    scaler = scaler_of(scale)
    scaler.register(a.optimizer, b.optimizer)
    scaler.scale(a.loss(math.inf) + b.loss(5.0)).backward()
    scaler.step(a.optimizer)
    scaler.step(b.optimizer)
    scaler.update()
    assert (a.value, b.value) == (0.0, -5.0)
    assert scaler.get_scale() == (1.0 if scale is None else 4.0)
    assert [scaler.skipped_steps(of) for of in (None, a.optimizer, b.optimizer)] == [1, 1, 0]


def test_the_result_of_a_step(weights, fused):
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with pytest.raises(RuntimeError, match="has not stepped under this scaler"):
        scaler.last_step(one.optimizer)
    one.backward(scaler, 3.0)
    scaler.clip_grad_norm_(one.optimizer, 1.0)
    scaler.step(one.optimizer)
    first = scaler.last_step(one.optimizer)
    assert first.scale_before == first.scale_after == 8.0
    scaler.update()
    assert (first.skipped, first.skipped_if_known()) == (False, False)
    assert first.norm.item() == pytest.approx(3.0 * 12**0.5, rel=1e-6)
    assert (first.scale_before, first.scale_after) == (8.0, 16.0)
    assert not first.overflow_report()
    assert str(first.overflow_report()) == "no overflow"
    one.train(scaler, math.inf)
    assert (first.scale_after, first.skipped) == (16.0, False)
    assert repr(scaler.last_step(one.optimizer)) == (
        "StepResult(skipped=True, norm=inf, scale_before=16.0, scale_after=8.0)"
    )


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_skip_is_told_and_counted(weights, poison, scale):
    one, scaler = weights(), scaler_of(scale, dynamic=False)
    scaler.register(one.optimizer)
    one.backward(scaler, 2.0)
    one.params[1].grad[2] = poison
    assert scaler.step(one.optimizer) is None
    result = scaler.last_step(one.optimizer)
    assert (result.skipped, result.skipped_if_known(), result.found_inf.item()) == (True, True, 1.0)
    assert (result.scale_before, result.scale_after) == (scale or 1.0, scale or 1.0)
    report = result.overflow_report()
    assert (report.nan if math.isnan(poison) else report.inf) == ("param_groups[0]['params'][1]",)
    assert scaler.skipped_steps() == scaler.skipped_steps(one.optimizer) == 1
    assert one.value == 0.0
    scaler.update()
    one.train(scaler, 2.0)
    assert (one.value, scaler.skipped_steps()) == (-2.0, 1)
    assert scaler.last_step(one.optimizer).norm.item() == pytest.approx(2.0 * 12**0.5)
    assert copy.deepcopy(scaler).skipped_steps() == pickle.loads(pickle.dumps(scaler)).skipped_steps() == 1


@pytest.mark.parametrize("early", ["unscale", "clip"])
def test_the_norm_of_a_step_is_that_of_all_micro_batches(weights, fused, early):
    one, other = weights(fused=fused), weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one.optimizer, other.optimizer)
    calls = {
        "unscale": lambda: scaler.unscale_(one.optimizer),
        "clip": lambda: scaler.clip_grad_norm_(one.optimizer, 1e9),
    }
    for gradient in (3.0, 4.0):
        scaler.scale(one.loss(gradient)).backward()
        calls[early]()
    scaler.clip_grad_norm_(one.optimizer, 0.5)
    scaler.scale(other.loss(1.0)).backward()  # adds nothing to the first optimizer's gradients
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).norm.item() == pytest.approx(7.0 * 12**0.5, rel=1e-6)


def test_results_nobody_keeps_are_not_kept(weights):
    """A constant scale needs no update(). Without update(), results must not accumulate."""
    one, scaler, results = weights(), GradScaler("cpu", dynamic=False), []
    for _ in range(5):
        one.backward(scaler)
        scaler.step(one.optimizer)
        results.append(weakref.ref(scaler.last_step(one.optimizer)))
    assert [result() is None for result in results] == [True] * 4 + [False]


def test_an_optimizer_without_gradients_steps(weights, scale):
    one, other, scaler = weights(), weights(), scaler_of(scale)
    scaler.register(other.optimizer)
    other.backward(scaler)
    assert scaler.step(one.optimizer) is None
    result = scaler.last_step(one.optimizer)
    assert (result.skipped, result.norm, str(result.overflow_report())) == (False, None, "no overflow")


def test_found_inf_is_exactly_one_on_the_fused_path(weights):
    """torch adds the flags of several devices. The CPU's fused AdamW takes the step if the sum is 2.0."""
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.found_inf.item())
            return super().step(closure)

    one = weights(optimizer=Spy, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(math.inf)).backward()
    scaler.update(4.0)  # an overflow caused by rescaling, and one in the gradients themselves
    scaler.step(one.optimizer)
    assert seen == [1.0]
    assert not hasattr(one.optimizer, "found_inf")
    assert not hasattr(one.optimizer, "grad_scale")


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_a_found_inf_that_somebody_left_skips_no_step(weights, cls):
    one = weights(optimizer=torch.optim.AdamW, count=1, fused=True, lr=0.5)
    one.optimizer.found_inf = torch.tensor(1.0)
    options = {"one_pass": False} if cls is GradScaler else {}
    scaler, before = cls("cpu", **options), one.params[0].detach().clone()
    scaler.scale(one.loss(1.0)).backward()
    scaler.step(one.optimizer)
    assert not torch.equal(one.params[0], before)


def test_a_users_grad_scale_is_respected(weights, scale):
    one = weights(fused=True)
    scaler = scaler_of(scale)
    scaler.scale(one.loss(3.0)).backward()
    one.optimizer.grad_scale = torch.tensor(2.0)
    scaler.step(one.optimizer)
    assert one.value == -1.5


def test_an_optimizer_that_takes_a_scaler_gets_none_where_nothing_is_scaled(weights):
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            assert grad_scaler is None
            super().step()

    one, scaler = weights(optimizer=Older), scaler_of(None)
    one.train(scaler, 3.0, math.inf)
    assert one.value == -3.0


def test_the_value_of_step_is_returned(weights, scale):
    class Returns(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            return 7.0

    one, scaler = weights(optimizer=Returns), scaler_of(scale)
    one.backward(scaler, 3.0)
    assert scaler.step(one.optimizer) == 7.0
    scaler.update()
    one.backward(scaler, math.inf)
    assert scaler.step(one.optimizer, None) is None


def test_no_host_sync_before_somebody_asks(weights, forbid_host_syncs, scale):
    """On the fused path, nothing is read back."""
    one = weights(fused=True, optimizer=torch.optim.AdamW)
    scaler = scaler_of(scale)
    with forbid_host_syncs():
        for in_step in (False, True, True):
            one.backward(scaler, 3.0)
            if in_step:
                scaler.clip_and_step(one.optimizer, 1.0)
            else:
                scaler.clip_grad_norm_(one.optimizer, 1.0)
                scaler.clip_grad_norm_(one.params, 0.5)
                scaler.clip_grad_value_(one.optimizer, 0.5)
                scaler.step(one.optimizer)
            scaler.update()
        assert scaler.last_step(one.optimizer).norm is not None
        scaler.clip_grad_norm_(one.optimizer, 1.0)
    assert not scaler.last_step(one.optimizer).skipped


def test_whatever_has_a_step_passes():
    class Engine:
        def step(self, *args):
            return args

    assert scaler_of(None).step(Engine(), 1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"one_pass": False}, "one_pass=False"),
        ({"on_nonfinite": "ignore"}, "torch's own step (on_nonfinite='ignore')"),
    ],
)
def test_options_leave_the_step_and_the_clip_to_torch(options, text):
    run, theirs = (Run("sgd", scaler=scaler_of(None, **options)) for _ in range(2))
    with OpsSeen() as seen:
        result = run.clip_and_step()
    assert text in result.how
    assert "clip_factor" not in seen.names
    theirs.backward()
    right = torch.nn.utils.clip_grad_norm_(theirs.params, 0.5)
    theirs.optimizer.step()
    assert torch.equal(result.norm, right)
    assert all(map(torch.equal, run.gradients(), theirs.gradients()))
    assert all(map(torch.equal, run.values(), theirs.values()))


# -- the path of a step ------------------------------------------------------------------------------


class Calls:
    """Records the functions of amp_plugin.scaling that run inside ``with``, by file and name."""

    def __init__(self):
        self.seen = []

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parts[-3:-1] == ("amp_plugin", "scaling"):
            self.seen.append((path.name, frame.f_code.co_name))


FORMS = ["plain", "in one call", "closure"]
MOST_FILES = {"plain": 14, "in one call": 13, "closure": 16}
"""shared.py, which owns what optimizers share, and spikes.py are among them."""


def take(run, form, poison=1.0):
    """Take one step with a clip, in one of the forms."""

    def backward():
        run.backward(factor=poison)
        if form != "in one call":
            run.scaler.clip_grad_norm_(run.optimizer, 0.5)

    if form == "closure":
        run.scaler.step(run.optimizer, backward)
    elif form == "in one call":
        backward()
        run.scaler.clip_and_step(run.optimizer, 0.5)
    else:
        backward()
        run.scaler.step(run.optimizer)
    run.scaler.update()
    return run.scaler.last_step(run.optimizer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_skip_is_counted_once(flags, form, scale):
    run, learnt = Run("adamw", scaler=scaler_of(scale), **flags), []
    run.scaler.core.log.subscribe(lambda step: learnt.append(step.skipped))
    poisons = [1.0, math.inf, 1.0, math.nan, math.nan, 1.0]
    for poison in poisons:
        take(run, form, poison)
    run.scaler.core.log.read(wait=True)
    assert learnt == [poison != 1.0 for poison in poisons]
    assert run.scaler.skipped_steps() == run.scaler.skipped_steps(run.optimizer) == 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one_pass", [True, False])
def test_why_not_one_pass_is_asked_once_per_step(one_pass, form, scale):
    run = Run("adamw", scaler=scaler_of(scale, one_pass=one_pass))
    for _ in range(3):
        with Calls() as calls:
            take(run, form)
        assert [name for _, name in calls.seen].count("why_not_one_pass") == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=str)
@pytest.mark.native
def test_the_files_that_a_step_with_a_clip_passes_through(flags, form):
    run = Run("adamw", scaler=scaler_of(2.0**10), **flags)
    take(run, form)
    run.backward()
    with Calls() as calls:
        if form == "closure":
            run.scaler.step(run.optimizer, lambda: run.scaler.clip_grad_norm_(run.optimizer, 0.5))
        elif form == "in one call":
            run.scaler.clip_and_step(run.optimizer, 0.5)
        else:
            run.scaler.clip_grad_norm_(run.optimizer, 0.5)
            run.scaler.step(run.optimizer)
    files = {file for file, _ in calls.seen}
    assert len(files) <= MOST_FILES[form], sorted(files)
