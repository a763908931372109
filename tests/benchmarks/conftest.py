"""A small report whose figures are known."""

import pytest

from benchmarks.harness import OURS, Comparison, Gate, measure
from benchmarks.report import Report, SectionRecord
from benchmarks.setting import Plot


def outcome(name, table, ours, theirs, label="torch", **options):
    """Return the outcome of a comparison in which all samples are equal."""
    samples = {OURS: lambda: ours, label: lambda: theirs}
    return measure(Comparison(name=name, table=table, samples=samples, rounds=3, **options))


def record(*outcomes, plots=()):
    """Return a section that ran on one thread."""
    return SectionRecord(
        date="2026-01-02", seconds=3.0, threads=1, timing="CPU time", plots=plots, outcomes=outcomes
    )


@pytest.fixture(scope="session")
def report():
    """Return sections with a faster result, a slower result and a plot."""
    plot = Plot(table="in place", x_label="tensors", y_label="time per tensor, {unit}")
    growth = [outcome(str(n), "clip in place", 2.0 / n, 4.0, x=n, per=2) for n in (10, 100, 1000)]
    return Report(
        device="cpu",
        machine="Some CPU, 2 cores",
        details="AVX2",
        torch="2.13.0+cpu",
        python="3.11.0",
        sections={
            "models": record(
                outcome("fast", "Models", 1500.0, 3000.0, gates=(Gate(limit=1.0),)),
                outcome("slow", "Models", 3000.0, 1500.0, gates=(Gate(limit=1.0),)),
            ),
            "kernels": record(outcome("sum", "Ops", 3.0, 2.0, label="limit")),
            "tensors": record(*growth, plots=(plot,)),
        },
    )
