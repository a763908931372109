"""The charts of the page, as Vega-Lite; their data are given by name when the page is opened."""

from __future__ import annotations

from typing import Any, Final

_SKIP: Final = "#d1242f"
_BEFORE, _AFTER = "#bf8700", "#2f81f7"
_HEIGHT: Final = 190
_LEAST_ROW, _MOST_ROW, _MAP_HEIGHT = 4, 18, 620


def curve_charts(
    *, has_scale: bool, has_norm: bool, has_loss: bool, has_skips: bool, several: bool
) -> dict[str, dict[str, Any]]:
    """Return id -> chart of what is drawn over optimizer steps."""
    import altair as alt  # noqa: PLC0415 - of the extra

    def marked(curves: Any, title: str) -> dict[str, Any]:
        layers = [curves, _skips(alt)] if has_skips else [curves]
        chart = alt.layer(*layers).properties(width="container", height=_HEIGHT, description=title)
        return chart.interactive(bind_y=False).to_dict()

    charts = {}
    if has_scale:
        charts["scale"] = marked(_line(alt, {"scale": "loss scale"}, several, base=2), "Loss scale by step")
    norms = {"before": "before clipping", "after": "after clipping"}
    if has_norm:
        charts["norm"] = marked(_line(alt, norms, several, base=10), "Norm of the gradients by step")
    if has_loss:
        charts["loss"] = marked(_line(alt, {"loss": "loss"}, several), "Loss by step")
    return charts


def _line(alt: Any, columns: dict[str, str], several: bool, base: int | None = None) -> Any:
    names = list(columns)
    scale = alt.Scale(zero=False) if base is None else alt.Scale(type="log", base=base)
    axis = alt.Axis(format=".3~g" if base == 10 else "~g", tickCount=5)
    found = alt.Chart(alt.NamedData("curves")).transform_fold(names, as_=["kind", "value"])
    if base:  # a logarithm cannot show 0
        found = found.transform_calculate(value="datum.value > 0 ? datum.value : null")
    label = " : ".join(f"datum.kind == '{name}' ? '{text}'" for name, text in columns.items()) + " : ''"
    found = found.transform_calculate(what=label)
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1, offset=4) if len(names) > 1 else None
    colour = alt.Color("what:N", scale=alt.Scale(range=[_BEFORE, _AFTER][-len(names) :]), legend=legend)
    if len(names) > 1:
        colour.sort = list(columns.values())
    tips = [alt.Tooltip("step:Q", title="step")]
    tips += [
        alt.Tooltip(f"{name}:Q", title=text, format=".8~g" if base == 2 else ".5~g")
        for name, text in columns.items()
    ]
    tips += [alt.Tooltip("optimizer:N")] if several else []
    curve = {"interpolate": "step-after"} if base == 2 else {}
    encoded = found.mark_line(
        strokeWidth=1.6,
        strokeCap="round",  # a step between two that are not finite is a dot
        invalid="break-paths-show-domains",
        point={"size": 45, "opacity": 0.01},
        clip=True,
        **curve,
    ).encode(
        x=alt.X(
            "step:Q",
            title="optimizer step",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(tickMinStep=1, format="~d"),
        ),
        y=alt.Y("value:Q", title=None, scale=scale, axis=axis),
        color=colour,
        tooltip=tips,
    )
    return encoded.encode(detail="optimizer:N", strokeDash="optimizer:N") if several else encoded


def _skips(alt: Any) -> Any:
    """Return a mark at each skipped step."""
    tips = [
        alt.Tooltip("step:Q", title="skipped step"),
        alt.Tooltip("scale:Q", title="loss scale", format=".8~g"),
        alt.Tooltip("parameters:N", title="not finite"),
        alt.Tooltip("found:N", title="found"),
    ]
    marks = alt.Chart(alt.NamedData("skips")).encode(x="step:Q", tooltip=tips)
    rules = marks.mark_rule(color=_SKIP, opacity=0.25)
    heads = marks.mark_point(color=_SKIP, filled=True, shape="triangle-down", size=90, clip=False, opacity=1)
    return alt.layer(rules, heads.encode(y=alt.value(4)))


_RED, _ORANGE, _YELLOW, _GREEN, _BLUE = "#d1242f", "#e16f24", "#d4a72c", "#57ab5a", "#1f6feb"
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

    titles = {"first": "step", "last": "to step", "bits": "bits left (-1: overflow)", "zeros": "% zeros"}
    tips = [alt.Tooltip("module:N"), *(alt.Tooltip(f"{name}:Q", title=text) for name, text in titles.items())]
    height = max(60, min(_MAP_HEIGHT, _MOST_ROW * rows, max(_LEAST_ROW * rows, 12 * min(rows, 30))))
    charts = {}
    for name, (legend, description, domain, colours) in _MAPS.items():
        scale = alt.Scale(domain=domain, range=colours, clamp=True, type="linear", interpolate="rgb")
        steps = alt.Axis(tickMinStep=1, format="~d")
        chart = alt.Chart(alt.NamedData("cells"), description=description)
        cells = chart.transform_filter(f"isValid(datum.{name})").mark_rect(clip=True)
        encoded = cells.encode(
            x=alt.X("from:Q", title="optimizer step", scale=alt.Scale(nice=False), axis=steps),
            x2="to:Q",
            y=alt.Y("module:N", sort=None, title=None, axis=alt.Axis(labelLimit=170, labelOverlap=True)),
            color=alt.Color(f"{name}:Q", title=legend, scale=scale),
            tooltip=tips,
        )
        sized = encoded.properties(width="container", height=height)
        charts[name] = sized.interactive(bind_y=False).to_dict()
    return charts
