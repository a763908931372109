"""Draw benchmark figures as SVG files without a background, for light and dark web pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness import OURS, Outcome
from benchmarks.report import Report
from benchmarks.setting import Plot
from benchmarks.tables import RIVALS, grouped, loses, unit_of

INK = "#808080"  # a gray with a contrast of 4:1 on white and on dark pages
COLOURS = ("#d9591c", "#4a8fe0", "#2f9e6e", "#a874d1")
MARKERS = ("o", "s", "^", "D")
OVERVIEW = ("training", "models", "clipping", "steps", "lightning", "accelerate")
STYLE = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "amp_plugin",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(report: Report, folder: Path) -> dict[str, list[str]]:
    """Draw all figures of a report and save them in a folder.

    Returns:
        A dict that maps the key of each section (and ``"overview"``) to Markdown that shows its figures.
        Image paths are relative to the parent of ``folder``.
    """
    figures: dict[str, list[str]] = {}
    with mpl.rc_context(STYLE):
        for key, stem, text, figure in _figures(report):
            path = folder / f"performance-{report.device}-{stem}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            figures.setdefault(key, []).append(f"![{text}]({folder.name}/{path.name})")
    return figures


def _figures(report: Report) -> Iterator[tuple[str, str, str, Figure]]:
    for key, record in report.sections.items():
        for plot in record.plots:
            for table, rows in grouped(record.outcomes).items():
                if plot.table in table:
                    yield key, key, table, growth(plot, table, rows)
    shown = [report.sections[key] for key in OVERVIEW if key in report.sections]
    rows = [outcome for record in shown for outcome in record.outcomes if outcome.unit == "us"]
    if rows:
        yield (
            "overview",
            "overview",
            "Time of ours relative to torch's and the stock plugins'",
            overview(rows),
        )


def growth(plot: Plot, title: str, rows: Sequence[Outcome]) -> Figure:
    """Plot the median and interquartile range of each variant against the size of the problem."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = figure.subplots()
    largest = max(spread.median for row in rows for spread in row.times.values())
    divisor, unit = unit_of(largest, rows[0].unit)
    sizes = [row.x for row in rows]
    for label, colour, marker in zip(rows[0].times, COLOURS, MARKERS, strict=False):
        spreads = [row.times[label] for row in rows]
        axes.plot(sizes, [s.median / divisor for s in spreads], color=colour, marker=marker, label=label)
        axes.fill_between(
            sizes,
            [s.low / divisor for s in spreads],
            [s.high / divisor for s in spreads],
            color=colour,
            alpha=0.2,
            lw=0,
        )
    values = [row.times[label].median for row in rows for label in row.times]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    if max(values) > 20 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label.format(unit=unit))
    axes.set_title(title, fontsize=10)
    axes.grid()
    axes.legend()
    return figure


def overview(rows: Sequence[Outcome]) -> Figure:
    """Plot the ratio of our time to torch's time for each comparison. Orange means that ours is slower."""
    lines: list[tuple[str, tuple[Outcome, str] | None]] = []
    for table, members in grouped(rows).items():
        points = [(row.name, (row, label)) for row in members for label in row.ratios if label in RIVALS]
        if points:
            lines += [(table, None), *points]
    figure = Figure(figsize=(7.6, 0.21 * len(lines) + 0.8))
    axes = figure.subplots()
    for place, (_, found) in enumerate(lines):
        if found:
            row, label = found
            spread = row.ratios[label]
            colour = COLOURS[0] if loses(row, label) else COLOURS[1]
            axes.plot([spread.low, spread.high], [place, place], color=colour, lw=3, alpha=0.5)
            axes.plot(spread.median, place, color=colour, marker="o", ms=5)
    axes.axvline(1, color=INK, lw=1)
    axes.set_xscale("log")
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.4, 2.0]
    values = [row.ratios[label].median for _, found in lines if found for row, label in [found]]
    shown = [tick for tick in ticks if min(values) / 2 <= tick <= max(1.4, max(values) * 1.5)]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_yticks(range(len(lines)), [text for text, _ in lines], fontsize=8)
    for tick, (_, found) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("normal" if found else "bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel(f"time of {OURS} / time of torch or the stock plugin (left of 1: {OURS} is faster)")
    axes.grid(axis="x")
    return figure
