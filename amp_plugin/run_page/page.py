"""The page itself: what is known of a run, put into one HTML text that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from amp_plugin.numerics.finding import Finding
from amp_plugin.run_page.charts import curve_charts, map_charts
from amp_plugin.run_page.dtypes import Branch
from amp_plugin.run_page.headroom import Headroom
from amp_plugin.run_page.history import History, Look, Skip

_MOST_LISTED: Final = 50  # skips in the table
_NEAREST: Final = 3
_FAR: Final = 40.0  # bits: no fp16
_TOO_HIGH: Final = "the loss scale was too high for the gradients and was lowered, which is how it is found"
_OFTEN: Final = 0.05  # share of skipped steps that is worth a change

_FONT = "system-ui, sans-serif"
THEMES: Final = {
    name: {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted,
            "titleColor": muted,
            "gridColor": grid,
            "domainColor": grid,
            "tickColor": grid,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal"},
    }
    for name, muted, grid in (("light", "#59636e", "#e4e8ec"), ("dark", "#9198a1", "#2d333b"))
}
"""What Vega draws with, by the colour scheme of the reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that a page shows."""

    title: str
    name: str
    state: str  # "running", "finished", or what ended the run
    began: str
    written: str
    history: History
    headroom: Headroom
    limits: Mapping[str, float]  # by module: the largest number of the dtype its gradients are made in
    dtypes: Mapping[str, str]
    tree: Branch
    rules: Mapping[str, Mapping[str, tuple[str, str]]]  # by device and op: torch's rule and another in force
    looks: Sequence[Look]
    unseen: Sequence[str]  # sentences: which steps it shows less of
    surroundings: Mapping[str, str]
    options: Mapping[str, str]
    command: str


def require_libraries() -> None:
    """Raise if the packages that draw the page are missing."""
    try:
        import altair  # noqa: F401, PLC0415, ICN001 - optional
        import jinja2  # noqa: F401, PLC0415 - optional
        import vl_convert  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        packages = "altair jinja2 vl-convert-python"
        msg = f"a report needs {error.name}, which is not installed; run: pip install {packages}"
        raise ImportError(msg) from error


@cache
def _runtime() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert  # noqa: PLC0415 - of the extra

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace(
        "</script", "<\\/script"
    )


@cache
def _template() -> Any:
    import jinja2  # noqa: PLC0415 - of the extra

    here = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html.jinja")


def render(facts: Facts) -> str:
    """Return the page."""
    history, cells = facts.history, facts.headroom.cells(facts.limits)
    curves = history.curves()
    charts = curve_charts(
        has_scale=history.has_scale,
        has_norm=any(norm is not None for norm in curves["before"]),
        has_loss=any(loss is not None for loss in curves["loss"]),
        has_skips=bool(history.skips),
        several=history.optimizers > 1,
    )
    maps = map_charts(len(cells["modules"])) if cells["first"] else {}
    text: str = _template().render(
        facts=facts,
        short=list(in_short(facts)),
        nearest=nearest(facts),
        skips=history.skips[-_MOST_LISTED:],
        charts=charts if history.steps else {},
        maps=maps,
        data={"curves": curves, "skips": history.marks(), "cells": cells, "steps": history.steps},
        specs={**charts, **maps} if history.steps else {},
        themes=THEMES,
        runtime=_runtime(),
        looks=new_findings(facts.looks),
    )
    return text


# -- in words ------------------------------------------------------------------------------------


def in_short(facts: Facts) -> Iterable[tuple[str, str]]:
    """Yield question and answer: when did it skip, why, which layer is near overflow, what to change."""
    history = facts.history
    if not history.steps:
        yield "steps", " ".join(facts.unseen) or "no optimizer step yet"
        return
    when = f"{history.skipped} of {history.steps} steps"
    if history.skips:
        numbers = _ranges([skip.step for skip in history.skips])
        when += f": {numbers}"
    yield "skipped", when if history.skipped else f"none of {history.steps} steps"
    if history.skipped:
        yield from (("" if place else "why", reason) for place, reason in enumerate(_reasons(history)))
    if history.wrong_steps:
        yield "loss not finite", _ranges(history.wrong_steps)
    if history.learns_nothing:
        yield "gradients", f"all zero in each of the {history.steps - history.skipped} steps that were taken"
    near = nearest(facts)
    if near:
        name, dtype, bits, step = near[0]
        yield (
            "nearest to overflow",
            (
                f"{name}: at step {step} its largest gradient had {bits:.1f} bits left in {dtype}; "
                f"{_times(2.0**bits)} times as large, it would have overflowed"
                if bits < _FAR
                else f"no module: all have {int(bits)} bits left in {dtype}, or more"
            ),
        )
    yield from (("" if place else "change", change) for place, change in enumerate(_changes(facts)))
    yield from (("" if place else "not seen", text) for place, text in enumerate(facts.unseen))


def _reasons(history: History) -> list[str]:
    """Return why steps were skipped, once for those with one reason, with their numbers."""
    steps: dict[str, list[int]] = {}
    finding_scale = history.finding_scale
    for skip in history.skips:
        reason = _TOO_HIGH if skip in finding_scale else _reason(skip)
        steps.setdefault(reason, []).append(skip.step)
    return [f"{_ranges(numbers, most=6)}: {reason}" for reason, numbers in steps.items()]


def _reason(skip: Skip) -> str:
    if skip.findings:
        return f"{skip.findings[0].headline} ({skip.place})"
    if skip.scale is not None and skip.blames_scale:
        return _TOO_HIGH
    return f"{skip.parameters}. {skip.meaning}"


def _changes(facts: Facts) -> list[str]:
    history, finding_scale = facts.history, facts.history.finding_scale
    changes = []
    if finding_scale:
        scale, count = min(skip.scale or 1.0 for skip in finding_scale) / 2, len(finding_scale)
        steps = f"the first {count} steps, which were" if count > 1 else "the first step, which was"
        changes.append(f"lower init_scale to {scale:g}: it saves {steps} skipped while the scale was found")
    if history.learns_nothing:
        lost = "raise init_scale" if history.has_scale else "in fp16 use a loss scale"
        changes.append(
            "look for what cuts the loss off from the weights, such as detach(), no_grad() or a factor of 0; "
            f"if the gradients are too small for the dtype, {lost}"
        )
    looks = [look for look in facts.looks if look.step > len(finding_scale)]
    advice = dict.fromkeys(finding.advice for look in looks for finding in look.findings)
    if advice:
        return [*changes, *advice][:_NEAREST]
    others = history.skipped - len(finding_scale)
    if history.has_scale and 0 < others <= _OFTEN * history.steps:
        changes.append("nothing: a few skips keep the loss scale as high as the gradients allow")
    elif others or history.wrong_steps:
        changes.append("look at the modules that overflow, below; compute them in fp32 or use bf16")
    return changes or ["nothing: no step was skipped"]


def new_findings(looks: Iterable[Look]) -> list[tuple[Look, list[Finding]]]:
    """Return each look with those of its findings that none before it had."""
    known: set[tuple[object, ...]] = set()
    kept = []
    for look in looks:
        new = [finding for finding in look.findings if (finding.headline, finding.place) not in known]
        known |= {(finding.headline, finding.place) for finding in new}
        if new or not look.findings:
            kept.append((look, new))
    return kept


def nearest(facts: Facts) -> list[tuple[str, str, float, int]]:
    """Return module, dtype, bits left and step of those nearest to overflow, skipped steps left out."""
    bits = facts.headroom.bits(facts.limits)
    taken = [i for i in range(bits.shape[1]) if not bool((bits[:, i] < 0).any())]
    if not taken:
        return []
    found = []
    for row, name in enumerate(facts.headroom.modules):
        known = [(value, i) for i in taken if (value := float(bits[row, i])) < float("inf")]
        if known:
            least, column = min(known)
            found.append((name or "(model)", facts.dtypes[name], least, facts.headroom.columns[column].first))
    return sorted(found, key=lambda entry: entry[2])[:_NEAREST]


def _times(factor: float) -> str:
    return f"{factor:.2g}" if factor < 10 else f"{factor:,.0f}"


def _ranges(numbers: Sequence[int], most: int = 12) -> str:
    """Return numbers in words: ``steps 1 to 3, 57``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"step{'s' * (len(numbers) > 1)} {', '.join(texts[:most])}{more}"
