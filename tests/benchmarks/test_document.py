"""Pages are generated from the figures, and the text around the figures is kept."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from benchmarks import plots
from benchmarks.document import PAGES, blocks, filled, read_pages
from benchmarks.report import RESULTS, Report

ONE, OTHER = PAGES[:2]


def test_blocks_go_between_their_markers():
    pages = {ONE: "prose\n", OTHER: "prose\n<!-- begin cpu a -->\nold\n<!-- end cpu a -->\nmore\n"}
    once = filled(pages, {"cpu a": "new \\1"})
    assert once == {
        ONE: "prose\n",
        OTHER: "prose\n<!-- begin cpu a -->\nnew \\1\n\n<!-- end cpu a -->\nmore\n",
    }
    assert filled(once, {"cpu a": "new \\1"}) == once


def test_a_section_without_a_place_is_an_error():
    with pytest.raises(
        ValueError, match="no page has a place for the figures of 'cpu b'; add the lines <!-- begin cpu b -->"
    ):
        filled({ONE: "prose"}, {"cpu b": "new"})


def test_figures_are_drawn_with_units_and_the_same_each_time(report, tmp_path):
    drawn = plots.draw(report, tmp_path)
    assert drawn["tensors"] == [f"![clip in place]({tmp_path.name}/performance-cpu-tensors.svg)"]
    assert len(drawn["overview"]) == 1
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    plots.draw(report, tmp_path)
    assert first == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for content in first.values():
        ET.fromstring(content)
        assert "time per tensor, µs".encode() in content or b"time of amp_plugin" in content


def test_each_title_in_the_overview_has_points_below_it():
    report = Report.from_json(next(RESULTS.glob("*2-cores*.json")).read_text(encoding="utf-8"))
    rows = [row for record in report.sections.values() for row in record.outcomes if row.unit == "us"]
    labels = plots.overview(rows).axes[0].get_yticklabels()
    weights = [label.get_fontweight() for label in labels]
    assert "bold" in weights
    assert ("bold", "bold") not in pairwise([*weights, "bold"])


def test_the_pages_show_the_kept_figures_and_no_others(tmp_path):
    """Tables are never edited by hand: generating the pages again changes nothing."""
    (tmp_path / "images").mkdir()
    pages, last = read_pages(), {}
    for file in sorted(RESULTS.glob("*.json")):
        report = Report.from_json(file.read_text(encoding="utf-8"))
        assert report.path.name == file.name
        date = max(record.date for record in report.sections.values())
        last[report.device] = max((date, len(last), report), last.get(report.device, ("", 0, None)))
    assert "cpu" in last
    for _, _, report in last.values():  # the report that the pages show
        assert filled(pages, blocks(report, plots.draw(report, tmp_path / "images"))) == pages
