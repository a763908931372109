"""The log of steps is right, in whatever order the host learns of skipped steps."""

import copy
import itertools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_plugin import GradScaler
from amp_plugin.scaling import OverflowReport, step_log
from amp_plugin.scaling.step_log import StepLog, StepResult
from tests.scaling.runs import Run, scaler_of


class Result(StepResult):
    """A StepResult whose outcome the host knows only from a given step on."""

    def __init__(self, clock, *, skipped, delay):
        super().__init__(
            norm=None,
            found_inf=torch.tensor(float(skipped)),
            scale_before=None,
            report=OverflowReport,
            known=skipped,
        )
        self._clock, self._known_at = clock, clock[0] + delay

    def skipped_if_known(self):
        return super().skipped_if_known() if self._clock[0] >= self._known_at else None


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def add(log, optimizer, *, skipped, delay=0, clock=(0,)):
    log.add(optimizer, Result(clock, skipped=skipped, delay=delay))


def held(skips, delays, *, exact=False, of_one=False):
    """Return, for each step of one optimizer, whether its schedulers skip it."""
    log, clock, told, optimizer = StepLog(), [0], [], sgd()
    if exact or of_one:
        log.wait_for(optimizer if of_one else None)
    for skipped, delay in zip(skips, delays, strict=True):
        add(log, optimizer, skipped=skipped, delay=delay, clock=clock)
        told.append(log.holds_schedulers(optimizer))
        assert log.holds_schedulers(optimizer) is told[-1], "asking changes nothing"
        clock[0] += 1
    assert log.skipped_steps() == log.skipped_steps(optimizer) == sum(skips)
    return told


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"of_one": True}])
@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.data())
def test_a_skip_known_at_once_holds_schedulers_at_once_and_an_exact_log_waits(options, skips, data):
    latest = 3 if options else 0
    delays = data.draw(st.lists(st.integers(0, latest), min_size=len(skips), max_size=len(skips)))
    assert held(skips, delays, **options) == skips


@pytest.mark.parametrize(
    ("skips", "delays", "expected"),
    [
        # known one step later
        ([True, False, False, True, False], [1] * 5, [False, True, False, False, True]),
        # known in order
        ([True, True, False, False, False], [2, 0, 0, 0, 0], [False, False, True, True, False]),
    ],
)
def test_a_skip_known_later_holds_schedulers_later(skips, delays, expected):
    assert held(skips, delays) == expected


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=10), st.integers(0, 3))
def test_schedulers_are_held_once_for_each_skip(skips, delay):
    # good steps, in which schedulers can make up for earlier ones
    calm = [False] * (len(skips) * (delay + 2) + delay)
    told = held([*skips, *calm], [delay] * (len(skips) + len(calm)))
    assert sum(told) == sum(skips)


@pytest.mark.parametrize("order", [*itertools.permutations([0, 1, 2])])
def test_each_optimizer_has_its_own_skips(order):
    log, optimizers, seen = StepLog(), [sgd() for _ in range(3)], []
    log.subscribe(lambda step: seen.append((step.optimizer(), step.in_a_row)))
    for number in order:
        add(log, optimizers[number], skipped=number == 1)
    assert [log.holds_schedulers(optimizer) for optimizer in optimizers] == [False, True, False]
    assert seen == [(optimizers[number], int(number == 1)) for number in order]
    assert not log.holds_schedulers(sgd())


def test_every_subscriber_learns_of_each_step_once_and_in_order():
    log, clock, optimizer, seen = StepLog(), [0], sgd(), {"a": [], "b": []}
    for steps in seen.values():
        log.subscribe(lambda step, steps=steps: steps.append(step.in_a_row))
    for skipped, delay in ((True, 3), (True, 0), (False, 2), (True, 0)):
        add(log, optimizer, skipped=skipped, delay=delay, clock=clock)
        clock[0] += 1
    assert len(log.unread_steps()) == 2
    log.read(wait=True)
    assert seen == {"a": [1, 2, 0, 1], "b": [1, 2, 0, 1]}
    assert (log.skipped_steps(), len(log.unread_steps())) == (3, 0)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.data())
def test_a_watcher_learns_of_each_step_at_once_and_schedulers_are_held_as_without_it(skips, data):
    delays = data.draw(st.lists(st.integers(0, 1), min_size=len(skips), max_size=len(skips)))
    log, clock, optimizer, told, seen = StepLog(), [0], sgd(), [], []
    with log.watched(lambda step: seen.append(step.skipped), lambda _: None):
        for number, (skipped, delay) in enumerate(zip(skips, delays, strict=True), 1):
            add(log, optimizer, skipped=skipped, delay=delay, clock=clock)
            assert len(seen) == number
            told.append(log.holds_schedulers(optimizer))
            clock[0] += 1
    assert seen == skips
    assert told == held(skips, delays)
    add(log, optimizer, skipped=True, delay=9, clock=clock)
    assert (len(seen), len(log.unread_steps())) == (len(skips), 1)


def test_losses_are_heard_while_someone_watches():
    log, heard = StepLog(), []
    with log.watched(lambda _: None, heard.append):
        log.note_loss(1.0)
    log.note_loss(2.0)
    assert heard == [1.0]


def test_an_optimizer_is_still_waited_for_after_a_state_was_loaded():
    log, optimizer = StepLog(), sgd()
    log.wait_for(optimizer)
    add(log, optimizer, skipped=True)
    log.start_over(7)
    assert not log.holds_schedulers(optimizer)
    assert (log.skipped_steps(optimizer), log.skipped_steps()) == (0, 7)
    add(log, optimizer, skipped=True, delay=1)
    assert log.holds_schedulers(optimizer)
    assert (log.skipped_steps(optimizer), log.skipped_steps()) == (1, 8)


def test_what_a_subscriber_raises_ends_the_step_and_loses_no_other():
    log, optimizer, seen = StepLog(), sgd(), []

    def refuse(step):
        seen.append(step.in_a_row)
        if step.in_a_row == 2:
            raise FloatingPointError

    log.subscribe(refuse)
    add(log, optimizer, skipped=True)
    with pytest.raises(FloatingPointError):
        add(log, optimizer, skipped=True)
    assert log.holds_schedulers(optimizer)
    add(log, optimizer, skipped=False)
    log.unsubscribe(refuse)
    add(log, optimizer, skipped=True)
    assert seen == [1, 2, 0]


def test_an_optimizer_that_is_gone_stays_counted():
    log = StepLog(skipped_before=5)
    for _ in range(40):  # some reuse the memory of earlier ones
        add(log, sgd(), skipped=True)
    assert log.skipped_steps() == 45


def test_a_captured_step_is_not_waited_for(monkeypatch):
    """Its flag belongs to the graph, and every replay writes it."""
    log, optimizer = StepLog(), sgd()
    monkeypatch.setattr(step_log, "capturing", lambda _: True)
    add(log, optimizer, skipped=True, delay=9)
    assert (len(log.unread_steps()), log.skipped_steps(optimizer)) == (0, 1)


def test_a_log_outlives_new_groups_of_ranks_and_stays_behind_copies():
    scaler, seen = GradScaler("cpu"), []
    scaler.core.log.subscribe(seen.append)
    log = scaler.core.log
    scaler.core.place("cpu")
    assert scaler.core.log is log
    assert copy.deepcopy(scaler).core.log is not log


def test_a_flag_that_the_host_knew_is_not_read_at_replays(monkeypatch):
    monkeypatch.setattr(step_log, "capturing", lambda _: True)
    decided = Result((0,), skipped=False, delay=0)
    decided.found_inf.fill_(1.0)
    assert (decided.skipped_if_known(), decided.skipped) == (False, False)
    captured = StepResult(norm=None, found_inf=torch.zeros(()), scale_before=None, report=OverflowReport)
    assert captured.skipped_if_known() is None
    captured.found_inf.fill_(1.0)
    assert captured.skipped


def test_a_flag_comes_to_the_host_whatever_the_default_and_the_current_device(monkeypatch):
    device, event, whole_empty = torch.device("cuda", 1), MagicMock(), torch.empty
    with torch.device("meta"):
        torch.ones(())  # torch must list its factory functions before one is patched

    def empty(*size, pin_memory, **options):  # without a GPU, memory cannot be pinned
        assert pin_memory  # else the copy would wait for the device
        return whole_empty(*size, **options)

    shown = {"device": device, "dtype": torch.float32, "shape": ()}
    flag = SimpleNamespace(**shown, reshape=lambda _: torch.ones((), device="cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(step_log, "capturing", lambda _: False)
    with torch.device("meta"):
        result = StepResult(norm=None, found_inf=flag, scale_before=None, report=OverflowReport)
        assert result.skipped_if_known() is True
    event(device).record.assert_called_once_with("the stream of cuda:1")


@pytest.mark.parametrize(
    "kinds", ["ss", "st", "ts", ""], ids=["all-skipped", "then-taken", "taken-first", "no-step"]
)
def test_the_end_of_a_run_warns_if_no_step_was_taken(kinds):
    """Each run is judged by its own steps: ``s`` is a skipped one, ``t`` one that is taken."""
    log, said = StepLog(), []
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for run in (kinds, "t", kinds):
        for kind in run:
            log.add(
                optimizer,
                StepResult(found_inf=torch.tensor(float(kind == "s")), scale_before=torch.tensor(2.0)),
            )
        log.end_run(said.append)
    assert len(said) == (2 if kinds == "ss" else 0)
    assert all("no optimizer step was taken: 2 steps of SGD in a row were skipped" in text for text in said)
    log.add(optimizer, StepResult(found_inf=torch.tensor(1.0), scale_before=torch.tensor(2.0)))
    log.end_run(None)  # a run that an error has ended
    assert len(said) == (2 if kinds == "ss" else 0)


def test_a_scaler_placed_again_among_the_same_ranks_keeps_its_optimizers_and_their_gradients_scales():
    training = Run("sgd", scaler=scaler_of(8.0))
    training.scaler.register(training.optimizer)
    training.backward(0, 1.0)
    training.scaler.core.place("cpu")
    assert training.scaler.core.optimizers == [training.optimizer]
    training.scaler.step(training.optimizer)
    expected = Run("sgd", scaler=scaler_of(8.0))
    expected.backward(0, 1.0)
    expected.scaler.step(expected.optimizer)
    assert all(map(torch.equal, training.params, expected.params))
