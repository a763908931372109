"""The charts of the page, drawn without a browser: where their lines break, and how their axes are written."""

import re

import pytest

from amp_plugin.run_page.page import curve_charts

vl_convert = pytest.importorskip("vl_convert")
pytest.importorskip("altair")

_VALUES = [1.0, 20.0, None, 3.0, None, 5.0, 0.07, 6.0]  # None: not finite


def drawn(name):
    """Return one of the charts as SVG."""
    rows = [
        {"step": i, "scale": 2.0 ** (16 - i), "optimizer": "0: SGD"}
        | dict.fromkeys(("before", "after", "loss"), value)
        for i, value in enumerate(_VALUES, start=1)
    ]
    charts = curve_charts({name: [row[name] for row in rows] for name in rows[0]}, has_skips=False)
    return vl_convert.vegalite_to_svg({**charts[name], "width": 400, "datasets": {"curves": rows}})


@pytest.mark.parametrize(("name", "lines"), [("loss", 1), ("norm", 2)])
def test_lines_break_at_steps_that_are_not_finite(name, lines):
    svg = drawn(name)
    paths = re.findall(r'"line mark" d="([^"]*)"[^>]*stroke-linecap="round"', svg)
    assert [path.count("M") for path in paths] == [3] * lines  # 1 and 2, 4 alone, 6 to 8
    assert [path.count("L") for path in paths] == [3] * lines
    assert svg.count('aria-roledescription="point"') == 6 * lines


@pytest.mark.parametrize("name", ["scale", "norm", "loss"])
def test_axes_have_plain_numbers(name):
    numbers = [
        text.replace("\u2212", "-") for text in re.findall(r"<text[^>]*>([^<]*\d[^<]*)</text>", drawn(name))
    ]
    assert len(numbers) > 6
    assert all(re.fullmatch(r"-?[\d.]+", number) for number in numbers), numbers
