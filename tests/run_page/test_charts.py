"""The charts of the page, drawn without a browser: gaps in lines, and labels of axes."""

import re

import pytest

from amp_plugin.run_page.page import curve_charts, map_charts, scale_text, short_names

vl_convert = pytest.importorskip("vl_convert")
pytest.importorskip("altair")

_VALUES = [1.0, 20.0, None, 3.0, None, 5.0, 0.07, 6.0]  # None stands for a number that is not finite


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
    paths = re.findall(r'"line mark" d="([^"]*)"', svg)
    # three segments: points 1 and 2, point 4 alone, points 6 to 8
    assert [path.count("M") for path in paths] == [3] * lines
    assert [path.count("L") for path in paths] == [3] * lines
    points = re.findall(r'aria-roledescription="point"[^>]*opacity="([\d.]+)"', svg)
    assert points.count("1") == lines  # point 4, which has no line
    assert points.count("0.01") == 6 * lines


@pytest.mark.parametrize("name", ["scale", "norm", "loss"])
def test_axes_have_plain_numbers(name):
    numbers = [
        text.replace("\u2212", "-") for text in re.findall(r"<text[^>]*>([^<]*\d[^<]*)</text>", drawn(name))
    ]
    assert len(numbers) > 6
    assert all(re.fullmatch(r"-?[\d.]+|2\^-?\d+", number) for number in numbers), numbers


def test_a_loss_scale_has_powers_of_two_on_its_axis():
    rows = [{"step": i, "scale": 2.0 ** (4 - 4 * i), "optimizer": "0: SGD"} for i in range(8)]
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"before": [None], "loss": [None]}
    chart = curve_charts(columns, has_skips=False)["scale"]
    svg = vl_convert.vegalite_to_svg({**chart, "width": 400, "datasets": {"curves": rows}})
    assert re.search(r">2\^[-\u2212]20<", svg)
    assert "e-" not in "".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


SCALES = {
    2.0**20: "2^20",
    2.0**-20: "2^-20",
    1024.0: "2^10",
    512.0: "512",
    1.0: "1",
    1.5e6: "1,500,000",
    0.3: "0.3",
}


@pytest.mark.parametrize(("scale", "text"), SCALES.items())
def test_a_loss_scale_has_one_form_on_the_page_and_in_its_chart(scale, text):
    assert scale_text(scale) == text
    row = {"step": 1, "scale": scale, "optimizer": "0: SGD", "before": None, "loss": None}
    chart = curve_charts({name: [value] for name, value in row.items()}, has_skips=False)["scale"]
    svg = vl_convert.vegalite_to_svg({**chart, "width": 400, "datasets": {"curves": [row]}})
    assert f"loss scale: {text}" in svg


LAYERS = [
    f"encoder.layers.{number}.attention.self.{name}" for number in range(12) for name in ("query", "key")
]


@pytest.mark.parametrize("names", [LAYERS, ["short", "x" * 60, "x" * 59 + "y"], ["one"], []])
def test_names_are_cut_in_the_middle_and_no_two_read_alike(names):
    cut = short_names(names)
    shown = [cut.get(name, name) for name in names]
    assert len({*shown}) == len(names)
    for name, text in cut.items():
        head, _, tail = text.partition("…")
        assert len(text) < len(name)
        assert name.startswith(head)
        assert name.endswith(tail)
    if names == LAYERS:
        assert max(map(len, shown)) <= 32


def test_the_map_shows_the_short_names():
    spec = map_charts(LAYERS)["bits"]
    cells = [{"module": name, "from": 0.5, "to": 1.5, "bits": 3.0, "zeros": 1.0} for name in LAYERS]
    svg = vl_convert.vegalite_to_svg({**spec, "width": 300, "datasets": {"cells": cells}})
    shown = re.findall(r">(enc[^<]*…[^<]*)<", svg)
    assert {*shown} <= {*short_names(LAYERS).values()}
    assert len(shown) > 5
