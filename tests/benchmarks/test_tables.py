"""Cells, tables and captions."""

import pytest

from benchmarks import tables
from benchmarks.harness import Spread


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0375, "us", "37.5 ns"),
        (8.5, "us", "8.50 µs"),
        (3780, "us", "3.78 ms"),
        (2.5e6, "us", "2.50 s"),
        (1_354_888, "bytes", "1.35 MB"),
        (25, "casts", "25.0"),
        (1.1e-2, "relative error", "1.1e-02"),
        (0.0, "us", "0.00 ns"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(value, unit, text):
    assert tables.quantity(value, unit) == text


def test_ratios_show_the_middle_half():
    assert tables.ratio(Spread(median=0.94, low=0.93, high=0.96)) == "0.94 (0.93 to 0.96)"
    assert tables.ratio(Spread(median=0.042, low=0.038, high=0.045)) == "0.042 (0.038 to 0.045)"
    assert tables.ratio(Spread(median=2.0, low=2.0, high=2.0)) == "2.00"


@pytest.mark.parametrize(
    ("label", "median", "low", "loses"),
    [
        ("torch", 1.02, 1.01, True),
        ("torch", 1.02, 0.99, False),
        ("torch", 1.005, 1.001, False),
        ("limit", 1.5, 1.4, False),
    ],
)
def test_a_loss_is_one_against_a_rival_in_three_quarters_of_the_rounds(label, median, low, loses):
    assert tables.loses(label, Spread(median=median, low=low, high=2.0)) is loses


def test_a_section_shows_losses_and_missed_promises_in_bold(report):
    assert (
        tables.section(report, "models", ["![figure](images/x.svg)"])
        == """**Models**

|  | amp_plugin | torch | ours / torch | promised |
| --- | ---: | ---: | ---: | ---: |
| fast | 1.50 ms | 3.00 ms | 0.50 | at most 1.00: kept |
| slow | 3.00 ms | 1.50 ms | **2.00** | **at most 1.00: missed** |

![figure](images/x.svg)

*Some CPU, 2 cores (AVX2), 1 thread, torch 2.13.0+cpu, 2026-01-02; CPU time, median of 3 rounds in turns.*"""
    )


def test_the_summary_has_one_promise_of_each_section(report):
    lines = tables.summary(report).splitlines()
    assert lines[0] == "|  | against | ours / theirs | promised |"
    assert lines[2] == "| Models: fast | torch | 0.50 | at most 1.00: kept |"
    assert len(tables.summary(report, most=0).splitlines()) == 2


def test_all_losses_are_listed(report):
    listed = tables.losses(report)
    assert "| Models: slow | torch | 2.00 |" in listed
    assert listed.count("\n") == 2
