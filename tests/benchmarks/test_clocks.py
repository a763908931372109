"""What a sample times and what it leaves out, and how peaks of memory are found."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch

from benchmarks.clocks import thread_time, waited, wall_time
from benchmarks.memory import peak


def test_wall_time_is_microseconds_of_one_call_without_what_prepares_it():
    @contextmanager
    def slow_context():
        time.sleep(0.1)
        yield

    sample = wall_time(
        lambda: time.sleep(0.01), repeat=3, prepare=lambda: time.sleep(0.1), around=slow_context
    )
    assert 10_000 <= sample() < 60_000


def test_cpu_time_does_not_count_waiting():
    assert thread_time(lambda: time.sleep(0.05))() < 20_000


def test_a_sample_prepares_once_and_calls_as_often_as_said():
    calls = []
    wall_time(lambda: calls.append("call"), repeat=3, prepare=lambda: calls.append("prepare"))()
    assert calls == ["prepare", "call", "call", "call"]


def test_waiting_only_grows():
    before = waited()
    assert waited() >= before >= 0


@pytest.mark.filterwarnings("ignore:.*")
def test_a_peak_counts_what_is_allocated_at_once():
    def call():
        first = torch.empty(1_000_000)
        second = torch.empty(500_000)
        del first, second
        torch.empty(1_100_000)

    assert peak(call, "cpu")() == 6_000_000
