"""A run that only skips: its failing step is run again, the same in every bit."""

from functools import partial

import pytest
import torch

from amp_plugin import GradScaler, diagnose_skip
from amp_plugin.numerics.modules import buffers_kept


class Run:
    """A net with dropout in a plain loop, with a log of 0 from the step ``bad_from`` on."""

    def __init__(self, *, enabled, bad_from=0, accumulate=1):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = GradScaler("cpu", enabled=enabled, init_scale=2.0**10)
        self.bad_from, self.accumulate = bad_from, accumulate
        self.forwards = []

    def forward_and_backward(self, batch, bad):
        out = self.model(batch)
        self.forwards.append(out.detach().clone())
        self.scaler.scale((out.mul(0).log() if bad else out).sum()).backward()
        return out

    def steps(self, count, scheduled=None):
        for i in range(count):
            self.optimizer.zero_grad()
            for _ in range(self.accumulate):
                batch = torch.randn(2, 4)
                bad = i >= self.bad_from and (scheduled is None or i in scheduled)
                self.scaler.recorded(self.forward_and_backward, batch, bad)
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_step_runs_again(enabled, accumulate):
    run = Run(enabled=enabled, accumulate=accumulate)
    seen = []

    def explainer(replay):
        before = torch.get_rng_state(), [param.grad.clone() for param in run.model.parameters()]
        first = list(run.forwards[-accumulate:])
        run.forwards.clear()
        replay.run()
        seen.append((replay, first, list(run.forwards)))
        assert torch.equal(torch.get_rng_state(), before[0])
        grads = [param.grad for param in run.model.parameters()]
        assert all(torch.equal(a, b) or b.isnan().all() for a, b in zip(before[1], grads, strict=True))
        return "what was found"

    run.scaler.explain_skips(explainer, after=3)
    with pytest.warns(UserWarning, match=r"3 steps of AdamW in a row were skipped \(.*\nwhat was found"):
        run.steps(3)
    run.steps(4)  # told once
    ((replay, first, again),) = seen
    assert replay.in_a_row == 3
    assert replay.optimizer is run.optimizer
    assert replay.result.skipped
    assert len(replay.calls) == len(again) == accumulate
    assert all(map(torch.equal, first, again)), "dropout drew other numbers"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_goes_on_as_if_nothing_had_been_run_again(enabled):
    """Scale, gradients, weights: an explanation changes none of them."""
    ends = []
    for explained in (True, False):
        run = Run(enabled=enabled)
        if explained:
            run.scaler.explain_skips(lambda replay: str(replay.run()), after=2)
            with pytest.warns(UserWarning, match="2 steps of AdamW in a row"):
                run.steps(6, scheduled=(1, 2))
        else:
            run.steps(6, scheduled=(1, 2))
        ends.append([*run.model.parameters(), torch.tensor(run.scaler.get_scale())])
    assert all(map(torch.equal, *ends))


def test_a_healthy_run_keeps_no_batch():
    run = Run(enabled=False, bad_from=99)
    run.scaler.explain_skips(lambda _: "", after=2)
    run.steps(3)
    assert not run.scaler.step_log.calls
    assert run.scaler.recorded(lambda x: x + 1, 1) == 2


@pytest.mark.parametrize("optimizers", [1, 2])
def test_calls_of_an_earlier_step_are_not_those_of_one_that_nobody_recorded(optimizers):
    """As where a loop goes on in compiled code, whose passes cannot be run again."""
    run = Run(enabled=True)
    others = [torch.optim.SGD(run.model[0].parameters()) for _ in range(optimizers - 1)]
    run.scaler.register(run.optimizer, *others)
    run.steps(1)

    def steps(forward_and_backward):
        run.optimizer.zero_grad()
        forward_and_backward(torch.randn(2, 4), bad=True)
        calls = []
        for optimizer in (run.optimizer, *others):
            run.scaler.step(optimizer)
            calls.append(len(run.scaler.step_log.calls))
        run.scaler.update()
        return calls

    assert steps(partial(run.scaler.recorded, run.forward_and_backward)) == [1] * optimizers
    assert steps(run.forward_and_backward) == [0] * optimizers
    assert steps(partial(run.scaler.recorded, run.forward_and_backward)) == [1] * optimizers


def test_diagnose_names_the_op():
    run = Run(enabled=False)
    run.scaler.explain_skips(diagnose_skip, after=2)
    text = (
        r"(?s)2 steps of AdamW in a row were skipped \(nan in 4 gradients.*aten::log.default.*test_replay.py"
    )
    with pytest.warns(UserWarning, match=text):
        run.steps(2)


def test_buffers_that_passes_write_to_or_replace_are_put_back():
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("seen", seen := torch.zeros(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with buffers_kept(model):
        model(torch.randn(4, 2))
        model.seen.add_(1)
        model.seen = torch.ones(3)
    assert model.seen is seen
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_one_skip_is_too_few():
    with pytest.raises(ValueError, match="after=1 is not allowed; give at least 2 skipped steps in a row"):
        GradScaler("cpu").explain_skips(lambda _: "", after=1)
