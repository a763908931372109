"""Render the run report as a single HTML string that needs no other files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from amp_plugin.numerics.growth import DIVERGES, grown
from amp_plugin.run_page.headroom import Headroom
from amp_plugin.run_page.history import History

_MOST_LISTED: Final = 50  # the table of skipped steps has at most this many rows
_MOST_RANGES: Final = 12
_MOST_CHANGES: Final = 3
_TOO_HIGH: Final = (
    "the loss scale was too high for the gradients, so the scaler lowered it; this is how it finds the scale"
)
_LOSS_GROWN: Final = 100.0  # training counts as diverged if the loss grows by this factor
_OFTEN: Final = 0.05  # the report proposes a change if more than this fraction of steps is skipped


@cache
def _runtime() -> str:
    """Return the JavaScript of Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert  # noqa: PLC0415 - of the extra

    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return script.replace("</script", "<\\/script")


@cache
def _template() -> Any:
    import jinja2  # noqa: PLC0415 - of the extra

    here = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html.jinja")


def render(
    history: History,
    headroom: Headroom,
    dtypes: Mapping[str, torch.dtype],
    *,
    unseen: list[str],
    diagnose: str,
    **facts: object,
) -> str:
    """Return the run report as HTML. ``facts`` are passed to the template unchanged."""
    cells, curves = headroom.cells(dtypes), history.curves()
    charts = curve_charts(curves, has_skips=bool(history.skips)) if history.steps else {}
    maps = map_charts(cells["modules"]) if cells["first"] and history.steps else {}
    skips = [
        {
            "step": skip.step,
            "scale": scale_text(skip.scale),
            "parameters": skip.parameters,
            "modules": skip.modules,
        }
        for skip in history.skips
    ]
    text: str = _template().render(
        **facts,
        history=history,
        headroom=headroom,
        short=in_short(history, headroom.nearest(dtypes), unseen, diagnose),
        skips=skips[-_MOST_LISTED:],
        charts=charts,
        maps=maps,
        data={"curves": curves, "skips": skips, "cells": cells, "steps": history.steps},
        runtime=_runtime(),
    )
    return text


# -- in words --------------------------


def scale_text(scale: float | None) -> str:
    """Return a loss scale as text: ``2^20`` for a power of two, else digits, such as ``150,000``.

    Powers of two from 1 to 512 are written in digits too. The axis of the loss scale has the same labels.
    """
    if scale is None:
        return ""
    if math.frexp(scale)[0] == 0.5 and not 1 <= scale < 1000:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:,.0f}" if scale >= 1000 else f"{scale:g}"


def in_short(history: History, nearest: list[str], unseen: list[str], diagnose: str) -> dict[str, list[str]]:
    """Map each question at the top of the run report to its short answers.

    The answers say when and why steps were skipped, what is close to overflow, and what to change.
    """
    if not history.steps:
        return {"steps": unseen or ["no optimizer step yet"]}
    taken = history.steps - history.skipped
    skipped = f"{history.skipped or 'none'} of {history.steps} steps"
    numbers = f": {_ranges([skip.step for skip in history.skips])}" if history.skipped else ""
    answers = {
        "skipped": [skipped + numbers],
        "why": _reasons(history),
        "loss or gradients not finite": [_ranges(history.wrong_steps)] if history.wrong_steps else [],
        "gradients": [f"all gradients are zero in each of the {taken} steps that were not skipped"]
        * history.learns_nothing,
        "nearest to overflow": nearest,
        "what to change": _changes(history),
        "op and line": [f"to find them, run the program again with: {diagnose}"] * history.is_at_fault,
        "not shown": unseen,
    }
    return {question: answer for question, answer in answers.items() if answer}


def _reasons(history: History) -> list[str]:
    """Return a string for each reason why steps were skipped, with the numbers of the skipped steps."""
    steps: dict[str, list[int]] = {}
    # Maps a reason to the parameters of the first step that was skipped for this reason.
    first: dict[str, str] = {}
    modules = {skip.meaning: skip.modules for skip in reversed(history.skips) if skip.modules}
    finding_scale = {id(skip) for skip in history.finding_scale}
    for skip in history.skips:
        seen = modules.get(skip.meaning, "")
        reason = f"{first.setdefault(skip.meaning, skip.parameters)}. {skip.meaning} {seen}".strip()
        if id(skip) in finding_scale or skip.blames_scale:
            reason = _TOO_HIGH
        steps.setdefault(reason, []).append(skip.step)
    return [f"{_ranges(numbers)}: {reason}" for reason, numbers in steps.items()]


def _changes(history: History) -> list[str]:
    """Return what to change. Each string begins with the steps that it is about, or with the cause."""
    finding_scale, has_scale = history.finding_scale, any(history.curves()["scale"])
    changes = []
    if finding_scale:
        scale = min(skip.scale or 1.0 for skip in finding_scale) / 2
        digits = f"{scale:.17g}"  # the user can copy it
        power = f" ({scale_text(scale)})" * (scale_text(scale) != digits)
        changes.append(
            f"{_ranges([skip.step for skip in finding_scale])}: lower init_scale to {digits}{power}, because "
            "these steps were lost to finding the loss scale"
        )
    if history.learns_nothing:
        lost = "raise init_scale" if has_scale else "in fp16 use a loss scale"
        changes.append(
            "all gradients are zero: look for code that separates the loss from the weights, such as "
            f"detach(), no_grad() or a factor of 0; if the gradients are too small for the dtype, {lost}"
        )
    others = history.skipped - len(finding_scale) - history.spikes
    # If weights grow without limit, a wider dtype only delays the overflow.
    if growth := grown(history.growth):
        return [f"{growth}{DIVERGES}"]
    if (times := history.loss_growth) >= _LOSS_GROWN and others + len(history.wrong_steps):
        return [f"the loss had grown to {times:.3g} times its first value: {DIVERGES}"]
    if unhelped := [skip.step for skip in history.skips if not skip.lowering_helps]:
        changes.append(
            f"{_ranges(unhelped)}: run the command below to find the op and its line: a lower loss scale did "
            "not help, although earlier steps succeeded with a much higher loss scale"
        )
    else:
        changes += _changes_for_overflows(
            history, is_few=has_scale and others <= max(1, _OFTEN * history.steps)
        )
    if history.spikes:
        spikes = _ranges([skip.step for skip in history.skips if skip.is_spike])
        changes.append(f"{spikes}: look at the batches that on_spike= left out")
    return changes[:_MOST_CHANGES] or ["nothing: no step was skipped"]


def _changes_for_overflows(history: History, *, is_few: bool) -> list[str]:
    """Return what to change for the steps that were skipped after the loss scale had been found."""
    first = {skip.step for skip in history.finding_scale}
    rest = [skip for skip in history.skips if not skip.is_spike and skip.step not in first]
    wanted = [skip.step for skip in rest if is_few and skip.blames_scale]
    faulty = {skip.step for skip in rest}.union(history.wrong_steps).difference(wanted)
    changes = []
    if wanted:
        few = "a few skipped steps keep the loss scale as high as the gradients allow"
        changes.append(f"{_ranges(wanted)}: nothing, because {few}")
    if faulty:
        look = "look below at the modules that overflow; compute these modules in fp32, or use bf16"
        changes.append(f"{_ranges(sorted(faulty))}: {look}")
    return changes


def _ranges(numbers: Sequence[int]) -> str:
    """Return step numbers as text, such as ``steps 1 to 3, 57``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    more = f" and {len(texts) - _MOST_RANGES} more" if len(texts) > _MOST_RANGES else ""
    return f"step{'s' * (len(numbers) > 1)} {', '.join(texts[:_MOST_RANGES])}{more}"


_RED, _ORANGE, _YELLOW, _GREEN, _BLUE = "#d1242f", "#e16f24", "#d4a72c", "#57ab5a", "#2f81f7"
_HEIGHT: Final = 190
_SCALE_TEXT: Final = (  # the Vega expression that is the same as scale_text()
    "datum.value >= 1 && datum.value < 1000 || abs(log(datum.value) / LN2 - round(log(datum.value) / LN2)) "
    "> 1e-6 ? format(datum.value, datum.value < 1000 ? '~g' : ',.0f') "
    ": '2^' + (datum.value < 1 ? '-' : '') + format(abs(log(datum.value) / LN2), '.0f')"
)
# Selects isolated points, with missing values on both sides, because a line chart does not show them.
_ALONE: Final = "isValid(datum.value) && !isValid(datum.previous) && !isValid(datum.next)"
# Module names beside a heat map are cut to this many characters, or to more if two names would be equal.
_LABEL: Final = 27
_ROW, _MAP_HEIGHT = 18, 620


def curve_charts(curves: dict[str, list[Any]], *, has_skips: bool) -> dict[str, dict[str, Any]]:
    """Return the charts of curves over optimizer steps, as a dict from id to chart."""
    import altair as alt  # noqa: PLC0415 - of the extra

    several = len(set(curves["optimizer"])) > 1
    charts = {}
    for name, columns, base, title in (
        ("scale", ["scale"], 2, "Loss scale by step"),
        ("norm", ["before", "after"], 10, "Norm of the gradients by step"),
        ("loss", ["loss"], None, "Loss by step"),
    ):
        if any(value is not None for value in curves[columns[0]]):
            line = _line(alt, columns, base, several=several, has_alone=_has_alone(curves, columns, base))
            layers = alt.layer(line, _skips(alt)) if has_skips else alt.layer(line)
            sized = layers.properties(width="container", height=_HEIGHT, description=title)
            charts[name] = sized.interactive(bind_y=False).to_dict()
    return charts


def _steps(alt: Any, column: str) -> Any:
    axis = alt.Axis(tickMinStep=1, format="~d")
    return alt.X(f"{column}:Q", title="optimizer step", scale=alt.Scale(nice=False), axis=axis)


def _has_alone(curves: dict[str, list[Any]], columns: list[str], base: int | None) -> bool:
    """Return whether a curve has an isolated point, with missing values on both sides.

    A chart gets a layer for isolated points only if it has such points, because an empty layer has no extent.
    """
    for name in columns:
        shown: dict[str, list[bool]] = {}
        for optimizer, value in zip(curves["optimizer"], curves[name], strict=True):
            is_shown = value is not None and (base is None or value > 0)
            shown.setdefault(optimizer, [False]).append(is_shown)
        for row in shown.values():
            if any(
                list(three) == [False, True, False]
                for three in zip(row, row[1:], [*row[2:], False], strict=False)
            ):
                return True
    return False


def _line(alt: Any, columns: list[str], base: int | None, *, several: bool, has_alone: bool) -> Any:
    scale = alt.Scale(zero=False) if base is None else alt.Scale(type="log", base=base)
    axis = alt.Axis(format=".3~g" if base == 10 else "~g", tickCount=5)
    if base == 2:
        axis = alt.Axis(tickCount=5, labelExpr=_SCALE_TEXT)
    found = alt.Chart(alt.NamedData("curves")).transform_fold(columns, as_=["kind", "value"])
    if base:  # a logarithmic axis cannot show 0
        found = found.transform_calculate(value="datum.value > 0 ? datum.value : null")
    shown = [f"{name}:Q" for name in columns]
    if base == 2:
        found, shown = (
            found.transform_calculate(text=_SCALE_TEXT),
            [alt.Tooltip("text:N", title="loss scale")],
        )
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1, offset=4) if len(columns) > 1 else None
    colours = alt.Scale(range=[_YELLOW, _BLUE][-len(columns) :])
    marks = found.mark_line(
        strokeWidth=1.6,
        invalid="break-paths-show-domains",
        point={"size": 45, "opacity": 0.01},
        clip=True,
        interpolate="step-after" if base == 2 else "linear",
    )
    by_step = {"sort": [alt.SortField("step")], "groupby": ["kind", "optimizer"]}
    around = found.transform_window(previous="lag(value)", next="lead(value)", **by_step)
    alone = around.transform_filter(_ALONE).mark_point(filled=True, size=22, opacity=1, clip=True)
    encoded = [
        mark.encode(
            x=_steps(alt, "step"),
            y=alt.Y("value:Q", title=None, scale=scale, axis=axis),
            color=alt.Color("kind:N", sort=columns, scale=colours, legend=legend),
            tooltip=["step:Q", *shown, *["optimizer:N"][:several]],
        )
        for mark in ((marks, alone) if has_alone else (marks,))
    ]
    if several:
        encoded[0] = encoded[0].encode(detail="optimizer:N", strokeDash="optimizer:N")
    return alt.layer(*encoded)


def _skips(alt: Any) -> Any:
    """Return a chart layer that marks each skipped step."""
    tips = [
        alt.Tooltip("step:Q", title="skipped step"),
        alt.Tooltip("scale:N", title="loss scale"),
        alt.Tooltip("parameters:N", title="not finite"),
    ]
    marks = alt.Chart(alt.NamedData("skips")).encode(x="step:Q", tooltip=tips)
    rules = marks.mark_rule(color=_RED, opacity=0.25)
    heads = marks.mark_point(color=_RED, filled=True, shape="triangle-down", size=90, clip=False, opacity=1)
    return alt.layer(rules, heads.encode(y=alt.value(4)))


_MAPS: Final = {  # maps the name of each heat map to its legend, description, domain and colours
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


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Map long names to shorter names, in which the middle is left out. All short names are different."""
    for width in range(_LABEL, max(map(len, names), default=0)):
        for head in range(width // 3, width - 5):
            cut = {
                name: f"{name[:head]}…{name[len(name) - (width - head - 1) :]}"
                for name in names
                if len(name) > width
            }
            if len({cut.get(name, name) for name in names}) == len({*names}):
                return cut
    return {}


def map_charts(modules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return two heat maps of the gradients by module and step.

    The heat map ``bits`` shows the headroom in bits. The heat map ``zeros`` shows the percentage of zeros.
    """
    import altair as alt  # noqa: PLC0415 - of the extra

    rows, shorter = len(modules), short_names(modules)
    widest = max((len(shorter.get(name, name)) for name in modules), default=0)
    label = f"{json.dumps(shorter)}[datum.label] || datum.label"
    names = alt.Axis(labelLimit=max(170, 7 * widest), labelOverlap=True, labelExpr=label)
    tips = ["module:N", "first:Q", "last:Q", alt.Tooltip("bits:Q", title="bits left"), "zeros:Q"]
    charts = {}
    for name, (legend, description, domain, colours) in _MAPS.items():
        scale = alt.Scale(domain=domain, range=colours, clamp=True, type="linear", interpolate="rgb")
        chart = alt.Chart(alt.NamedData("cells"), description=description)
        cells = chart.transform_filter(f"isValid(datum.{name})").mark_rect(clip=True)
        encoded = cells.encode(
            x=_steps(alt, "from"),
            x2="to:Q",
            y=alt.Y("module:N", sort=None, title=None, axis=names),
            color=alt.Color(f"{name}:Q", title=legend, scale=scale),
            tooltip=tips,
        )
        sized = encoded.properties(width="container", height=max(60, min(_MAP_HEIGHT, _ROW * rows)))
        charts[name] = sized.interactive(bind_y=False).to_dict()
    return charts
