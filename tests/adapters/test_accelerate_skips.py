"""SkipLedger against every order in which a device may let the host know of its skips."""

import itertools
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_plugin.adapters.accelerate.skips import SkipLedger
from tests.adapters.accelerate_pair import ours, reset


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    reset()


class Result:
    """A StepResult that the host knows from a given step on."""

    def __init__(self, clock, *, skipped, delay):
        self.skipped = skipped
        self._clock = clock
        self._known_at = clock[0] + delay

    def skipped_if_known(self):
        return self.skipped if self._clock[0] >= self._known_at else None


def tell(skips, delays, *, exact=False):
    """Return what is told of each step of one optimizer."""
    ledger, clock, told = SkipLedger(exact=exact), [0], []
    for skipped, delay in zip(skips, delays, strict=True):
        ledger.stepped(1, Result(clock, skipped=skipped, delay=delay))
        told.append(ledger.skipped(1))
        clock[0] += 1
    return told


@given(st.lists(st.booleans(), max_size=12))
def test_known_at_once_is_told_at_once(skips):
    assert tell(skips, [0] * len(skips)) == skips


@given(st.lists(st.booleans(), max_size=12), st.data())
def test_exact_waits(skips, data):
    delays = data.draw(st.lists(st.integers(0, 3), min_size=len(skips), max_size=len(skips)))
    assert tell(skips, delays, exact=True) == skips


def test_known_one_step_later_is_told_one_step_later():
    assert tell([True, False, False, True, False], [1] * 5) == [False, True, False, False, True]


@given(st.lists(st.booleans(), max_size=10), st.integers(0, 3))
def test_a_scheduler_is_held_back_once_for_each_skip(skips, delay):
    calm = [False] * (len(skips) * (delay + 2) + delay)  # good steps, in which what is owed can be paid
    told = tell([*skips, *calm], [delay] * (len(skips) + len(calm)))
    assert sum(told) == sum(skips)


def test_skips_come_in_order_even_if_a_later_one_is_known_first():
    clock = [0]
    ledger = SkipLedger(exact=False)
    for skipped, delay in ((True, 2), (True, 0), (False, 0), (False, 0), (False, 0)):
        ledger.stepped(1, Result(clock, skipped=skipped, delay=delay))
        clock[0] += 1
        assert ledger.skipped(1) == (clock[0] in {2, 3})


def test_an_optimizer_that_did_not_step_is_not_told_of():
    ledger, clock = SkipLedger(exact=False), [0]
    for key, skipped in ((1, True), (2, False)):
        ledger.stepped(key, Result(clock, skipped=skipped, delay=0))
    assert (ledger.skipped(1), ledger.skipped(2), ledger.skipped(3)) == (True, False, False)
    ledger.stepped(2, Result(clock, skipped=False, delay=0))  # 2 again: a new iteration
    assert not ledger.skipped(1)


@pytest.mark.parametrize("order", [*itertools.permutations([1, 2, 3])])
def test_each_of_several_optimizers_is_told_of_until_the_iteration_ends(order):
    ledger, clock = SkipLedger(exact=False), deque([0])
    for key in order:
        ledger.stepped(key, Result(clock, skipped=key == 2, delay=0))
    assert [ledger.skipped(key) for key in (1, 2, 3)] == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
def test_a_fused_optimizer_on_a_gpu(exact):
    accelerator = ours(precision="fp16", cpu=False, init_scale=8.0, exact_schedulers=exact)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for factor in (1e38, 1.0, 1.0):
        accelerator.backward(model(torch.ones(2, 4, device="cuda")).sum() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        rates.append(schedule.get_last_lr()[0])
    assert rates[-1] == 0.25  # held back for one of three steps
    if exact:
        assert rates[0] == 1.0
    assert accelerator.amp_metrics()["skipped_steps"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_training_on_a_gpu(precision, dtype):
    torch.manual_seed(0)
    accelerator = ours(precision=precision, cpu=False, steps=2)
    assert accelerator.device.type == "cuda"
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    seen = []
    model[0].register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(64, 8, device="cuda")
    target = inputs.square().sum(dim=1, keepdim=True).sqrt()
    losses = []
    for _ in range(60):
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    assert set(seen) == {dtype}
    assert losses[-1] < 0.2 * losses[0]
