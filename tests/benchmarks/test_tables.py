"""Cells, tables and captions."""

from dataclasses import replace

import pytest

from benchmarks import tables
from benchmarks.harness import Gate, Spread
from benchmarks.report import Report
from tests.benchmarks.conftest import outcome, record


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
    ("label", "unit", "median", "low", "high", "loses"),
    [
        ("torch", "us", 1.02, 1.01, 2.0, True),
        ("torch", "us", 1.02, 0.99, 2.0, False),
        ("torch", "us", 1.005, 1.001, 2.0, False),
        ("limit", "us", 1.5, 1.4, 2.0, False),
        ("torch", "GB/s", 1.5, 1.4, 2.0, False),
        ("torch", "GB/s", 0.9, 0.8, 0.95, True),
        ("torch", "GB/s", 0.9, 0.8, 1.1, False),
    ],
)
def test_a_loss_is_one_against_a_rival_in_three_quarters_of_the_rounds(label, unit, median, low, high, loses):
    """For times and bytes, less is better. For GB/s, more is better."""
    row = replace(outcome("row", "Table", 1.0, 1.0), unit=unit)
    row = replace(row, ratios={label: Spread(median=median, low=low, high=high)})
    assert tables.loses(row, label) is loses


def test_missed_promises_are_listed_with_what_they_are_held_against():
    half = outcome(
        "half",
        "Ops",
        1.0,
        2.0,
        label="copy_",
        gates=(Gate(limit=0.85, measure="share of theirs", against="copy_"),),
    )
    whole = outcome(
        "whole",
        "Ops",
        2.0,
        2.0,
        label="copy_",
        gates=(Gate(limit=0.85, measure="share of theirs", against="copy_"),),
    )
    report = Report(
        device="cuda", machine="", details="", torch="", python="", sections={"a": record(half, whole)}
    )
    assert tables.missed(report).splitlines()[2:] == [
        "| Ops: half | copy_ | 0.50 | at least 85% of theirs: missed |"
    ]
    assert tables.missed(replace(report, sections={"a": record(whole)})) == "None in this run."


def test_a_section_shows_losses_and_missed_promises_in_bold(report):
    assert (
        tables.section(report, "models", ["![figure](images/x.svg)"])
        == """**Models**

|  | amp_plugin | torch | ours / torch | promised |
| --- | ---: | ---: | ---: | ---: |
| fast | 1.50 ms | 3.00 ms | 0.50 | at most 1.00: kept |
| slow | 3.00 ms | 1.50 ms | **2.00** | **at most 1.00: missed** |

![figure](images/x.svg)

*Each figure is the median of 3 rounds (CPU time), measured on 2026-01-02 with torch 2.13.0+cpu and 1 thread. \
Machine: Some CPU, 2 cores (AVX2).*"""
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


def test_rows_of_a_way_that_is_gone_are_explained_below_their_table(report):
    assert tables.OLD_WAY_NOTE not in tables.section(report, "models")
    (table,) = (outcome.table for outcome in report.sections["kernels"].outcomes)
    old = record(outcome("ResNet-50, folded", table, 3.0, 2.0, label="limit"))
    changed = replace(report, sections={**report.sections, "kernels": old})
    assert tables.section(changed, "kernels").endswith(tables.OLD_WAY_NOTE)
