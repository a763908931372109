"""The charts of the page, as Vega-Lite; their data are given by name when the page is opened."""

from __future__ import annotations

from typing import Any, Final

_RED, _ORANGE, _YELLOW, _GREEN, _BLUE = "#d1242f", "#e16f24", "#d4a72c", "#57ab5a", "#2f81f7"
_HEIGHT: Final = 190
_ROW, _MAP_HEIGHT = 18, 620


def curve_charts(curves: dict[str, list[Any]], *, has_skips: bool) -> dict[str, dict[str, Any]]:
    """Return id -> chart of what is drawn over optimizer steps."""
    import altair as alt  # noqa: PLC0415 - of the extra

    several = len(set(curves["optimizer"])) > 1
    charts = {}
    for name, columns, base, title in (
        ("scale", ["scale"], 2, "Loss scale by step"),
        ("norm", ["before", "after"], 10, "Norm of the gradients by step"),
        ("loss", ["loss"], None, "Loss by step"),
    ):
        if any(value is not None for value in curves[columns[0]]):
            line = _line(alt, columns, base, several=several)
            layers = alt.layer(line, _skips(alt)) if has_skips else alt.layer(line)
            sized = layers.properties(width="container", height=_HEIGHT, description=title)
            charts[name] = sized.interactive(bind_y=False).to_dict()
    return charts


def _steps(alt: Any, column: str) -> Any:
    axis = alt.Axis(tickMinStep=1, format="~d")
    return alt.X(f"{column}:Q", title="optimizer step", scale=alt.Scale(nice=False), axis=axis)


def _line(alt: Any, columns: list[str], base: int | None, *, several: bool) -> Any:
    scale = alt.Scale(zero=False) if base is None else alt.Scale(type="log", base=base)
    axis = alt.Axis(format=".3~g" if base == 10 else "~g", tickCount=5)
    found = alt.Chart(alt.NamedData("curves")).transform_fold(columns, as_=["kind", "value"])
    if base:  # a logarithm cannot show 0
        found = found.transform_calculate(value="datum.value > 0 ? datum.value : null")
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1, offset=4) if len(columns) > 1 else None
    colours = alt.Scale(range=[_YELLOW, _BLUE][-len(columns) :])
    encoded = found.mark_line(
        strokeWidth=1.6,
        strokeCap="round",  # a step between two that are not finite is a dot
        invalid="break-paths-show-domains",
        point={"size": 45, "opacity": 0.01},
        clip=True,
        interpolate="step-after" if base == 2 else "linear",
    ).encode(
        x=_steps(alt, "step"),
        y=alt.Y("value:Q", title=None, scale=scale, axis=axis),
        color=alt.Color("kind:N", sort=columns, scale=colours, legend=legend),
        tooltip=["step:Q", *(f"{name}:Q" for name in columns), *["optimizer:N"][:several]],
    )
    return encoded.encode(detail="optimizer:N", strokeDash="optimizer:N") if several else encoded


def _skips(alt: Any) -> Any:
    """Return a mark at each skipped step."""
    tips = [
        alt.Tooltip("step:Q", title="skipped step"),
        alt.Tooltip("scale:Q", title="loss scale"),
        alt.Tooltip("parameters:N", title="not finite"),
        "found:N",
    ]
    marks = alt.Chart(alt.NamedData("skips")).encode(x="step:Q", tooltip=tips)
    rules = marks.mark_rule(color=_RED, opacity=0.25)
    heads = marks.mark_point(color=_RED, filled=True, shape="triangle-down", size=90, clip=False, opacity=1)
    return alt.layer(rules, heads.encode(y=alt.value(4)))


_MAPS: Final = {  # figure -> legend, description, domain and colours
    "bits": (
        "bits left",
        "Bits of headroom of each module's largest gradient, by step",
        [-1, 0, 2, 5, 9, 14],
        ["#82071e", _RED, _ORANGE, _YELLOW, _GREEN, _BLUE],
    ),
    "zeros": (
        "% zeros",
        "Share of each module's gradients that is zero, by step",
        [0, 25, 60, 100],
        [_BLUE, _YELLOW, _ORANGE, _RED],
    ),
}


def map_charts(rows: int) -> dict[str, dict[str, Any]]:
    """Return id -> map of modules x steps: bits of headroom, and the share of zeros."""
    import altair as alt  # noqa: PLC0415 - of the extra

    tips = ["module:N", "first:Q", "last:Q", alt.Tooltip("bits:Q", title="bits left"), "zeros:Q"]
    charts = {}
    for name, (legend, description, domain, colours) in _MAPS.items():
        scale = alt.Scale(domain=domain, range=colours, clamp=True, type="linear", interpolate="rgb")
        chart = alt.Chart(alt.NamedData("cells"), description=description)
        cells = chart.transform_filter(f"isValid(datum.{name})").mark_rect(clip=True)
        encoded = cells.encode(
            x=_steps(alt, "from"),
            x2="to:Q",
            y=alt.Y("module:N", sort=None, title=None, axis=alt.Axis(labelLimit=170, labelOverlap=True)),
            color=alt.Color(f"{name}:Q", title=legend, scale=scale),
            tooltip=tips,
        )
        sized = encoded.properties(width="container", height=max(60, min(_MAP_HEIGHT, _ROW * rows)))
        charts[name] = sized.interactive(bind_y=False).to_dict()
    return charts
