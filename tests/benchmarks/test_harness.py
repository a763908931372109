"""Samples that take turns, medians, ratios and gates."""

import gc

import pytest

from benchmarks import harness
from benchmarks.harness import OURS, Comparison, Gate, Spread, judge, measure


def counting(values):
    """Return a sample that returns the given values one after another."""
    remaining = iter(values)
    return lambda: next(remaining)


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """Simulate a machine on which nothing else runs."""
    monkeypatch.setattr(harness, "waited", lambda: 0.0)


def test_a_spread_is_the_median_and_the_middle_half():
    assert Spread.of([5, 1, 3, 2, 4]) == Spread(median=3, low=2, high=4)
    assert Spread.of([7.0]) == Spread(median=7.0, low=7.0, high=7.0)


def test_ratios_are_taken_within_rounds():
    """The machine slows down from round to round.

    Medians of all times give a ratio of 2, ratios within rounds give 0.5.
    """
    samples = {OURS: counting([1, 20, 30]), "torch": counting([2, 10, 75])}
    outcome = measure(Comparison(name="x", samples=samples, rounds=3, warm_up=0))
    assert outcome.ratios["torch"].median == 0.5
    assert (outcome.times[OURS].median, outcome.times["torch"].median) == (20, 10)


def test_warm_up_is_not_counted_and_samples_are_divided():
    outcome = measure(
        Comparison(name="x", samples={OURS: counting([1000, 6, 8])}, rounds=2, warm_up=1, per=2)
    )
    assert outcome.times[OURS].median == 3.5


def test_every_variant_runs_once_a_round_in_changing_order():
    ran = []
    samples = {label: lambda label=label: float(len(ran.append(label) or ran)) for label in "abc"}
    measure(Comparison(name="x", samples=samples, rounds=20, warm_up=0))
    rounds = [tuple(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert all(sorted(labels) == ["a", "b", "c"] for labels in rounds)
    assert len(set(rounds)) == 6


def test_disturbed_rounds_are_taken_again(monkeypatch):
    """In every third round another program uses the processor, and the sample takes ten times as long."""
    clock, waiting = [0.0], [0.0]
    monkeypatch.setattr(harness, "waited", lambda: waiting[0])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    turns = []

    def sample():
        turns.append(0)
        disturbed = len(turns) % 3 == 1
        clock[0] += 10 if disturbed else 1
        waiting[0] += 9 if disturbed else 0
        return 10.0 if disturbed else 1.0

    outcome = measure(Comparison(name="x", samples={OURS: sample}, rounds=6, warm_up=0))
    assert len(turns) == 9
    assert outcome.times[OURS] == Spread(median=1.0, low=1.0, high=1.0)


def test_the_garbage_collector_is_off_while_it_measures_and_on_afterwards():
    seen = []
    measure(Comparison(name="x", samples={OURS: lambda: float(seen.append(gc.isenabled()) or 1)}, rounds=1))
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_variant_that_measures_nothing_has_no_ratio():
    outcome = measure(Comparison(name="x", samples={OURS: lambda: 1.0, "torch": lambda: 0.0}, rounds=1))
    assert outcome.ratios == {}


RATIO, TIMES, MORE, SHARE = "ours / theirs", "theirs / ours", "ours - theirs", "share of max(5 %, 0.1 us)"


@pytest.mark.parametrize(
    ("measure_", "limit", "ours", "theirs", "value", "promise"),
    [
        (RATIO, 1.15, 1.0, 2.0, 0.5, "at most 1.15: kept"),
        (RATIO, 1.0, 1.09, 1.0, 1.09, "at most 1.00: just missed"),
        (RATIO, 1.0, 1.11, 1.0, 1.11, "at most 1.00: missed"),
        (TIMES, 3.0, 1.0, 2.8, 2.8, "at least 3.00 times as fast: just missed"),
        (TIMES, 3.0, 1.0, 2.7, 2.7, "at least 3.00 times as fast: missed"),
        (MORE, 0.2, 1.23, 1.0, 0.23, "at most 0.200 µs more: missed"),
        (SHARE, 1.0, 10.2, 10.0, 0.4, "at most 5 % or 0.1 µs more: kept"),
        (SHARE, 1.0, 10.6, 10.0, 1.2, "at most 5 % or 0.1 µs more: missed"),
        (SHARE, 1.0, 1.12, 1.0, 1.2, "at most 5 % or 0.1 µs more: missed"),
    ],
)
def test_a_gate_fails_when_it_is_missed_by_more_than_a_tenth(measure_, limit, ours, theirs, value, promise):
    verdict = judge(Gate(limit=limit, measure=measure_), [ours] * 3, [theirs] * 3)
    assert verdict.value == pytest.approx(value)
    assert verdict.promise == promise
    assert verdict.holds is not promise.endswith(": missed")


def test_a_gate_against_a_variant_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'x' has no variant 'stock' for its gate, only \\['amp_plugin'\\]"):
        Comparison(name="x", samples={OURS: lambda: 1.0}, gates=(Gate(limit=1.0, against="stock"),))
