"""What a sample times and what it leaves out, and how peaks of memory are measured."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import clocks
from benchmarks.clocks import device_time, event_time, thread_time, wall_time
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


class Written(TorchDispatchMode):
    """A dispatch mode that records the ops that write to their inputs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append((str(op), op._schema.is_mutable))
        return op(*args, **kwargs or {})


def test_a_gpus_cache_is_flushed_by_reading(monkeypatch):
    """If it were flushed by writing, modified cache lines would be written back during the timing."""
    zeros = torch.zeros
    monkeypatch.setattr(clocks, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **where: zeros(*shape))
    event = SimpleNamespace(record=bool, synchronize=bool, elapsed_time=lambda end: 0.5)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    for clock in (event_time, device_time):
        sample = clock(lambda: None)
        with Written() as written:
            assert sample() == 500.0
        assert written.seen == [("aten.sum.default", False)]


@pytest.mark.filterwarnings("ignore:.*")
def test_a_peak_counts_what_is_allocated_at_once():
    def call():
        first = torch.empty(1_000_000)
        second = torch.empty(500_000)
        del first, second
        torch.empty(1_100_000)

    assert peak(call, "cpu")() == 6_000_000
