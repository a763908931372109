"""Format benchmark figures as table cells and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.elsewhere import CLIPPING, CLIPPING_SOURCE, DEEPSPEED
from benchmarks.harness import Outcome, Spread
from benchmarks.report import Report, SectionRecord

RIVALS = ("torch", "stock")
"""The variants that ours must not be slower than. All other variants are hardware limits."""

RATE = "GB/s"
"""The unit in which more is better."""

OLD_WAY = "folded"
OLD_WAY_NOTE = (
    '*Rows named "folded" are of release 0.3, where a clip left its factor to the next optimizer step. '
    "That feature was removed. `clip_and_step` clips within the step now; its rows replace these when the "
    "benchmarks run again.*"
)

UNITS: Mapping[str, Sequence[tuple[float, str]]] = {
    "us": ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
}


def unit_of(largest: float, unit: str) -> tuple[float, str]:
    """Choose a unit that suits the largest value of a table. Return its divisor and its name."""
    steps = UNITS.get(unit, ((1.0, "" if unit == "relative error" else unit),))
    return next((step for step in steps if largest >= step[0]), steps[-1])


def quantity(value: float, unit: str) -> str:
    """Format a value with three digits and its unit, such as ``3.78 ms``."""
    divisor, name = unit_of(abs(value), unit)
    scaled = value / divisor
    digits = 0 if name == "bytes" else 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0
    text = f"{scaled:.1e}" if unit == "relative error" else f"{scaled:.{digits}f}"
    return f"{text} {name}" if unit in UNITS else text.removesuffix(".00")


def ratio(spread: Spread) -> str:
    """Format a ratio and its interquartile range, such as ``0.94 (0.93 to 0.96)``."""
    digits = 3 if spread.median < 0.1 else 2
    middle = f"{spread.low:.{digits}f} to {spread.high:.{digits}f}"
    exact = spread.low == spread.high
    return f"{spread.median:.{digits}f}" if exact else f"{spread.median:.{digits}f} ({middle})"


def loses(row: Outcome, label: str) -> bool:
    """Return True if amp_plugin is clearly slower than the variant ``label``.

    Clearly slower means at least 1 % slower in the median round, and slower in at least 75 % of the rounds.
    """
    spread = row.ratios.get(label)
    if label not in RIVALS or spread is None:
        return False
    if row.unit == RATE:
        return spread.median <= 0.99 and spread.high < 1
    return spread.median >= 1.01 and spread.low > 1


def grouped(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Return a dict that maps the name of each table to its rows, in order."""
    tables: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        tables.setdefault(outcome.table, []).append(outcome)
    return tables


def cells(rows: Sequence[Outcome], mark: str = "**") -> list[list[str]]:
    """Return the header and rows of a table.

    Cells begin and end with ``mark`` if amp_plugin is slower than a rival or misses a limit.
    """
    labels, compared = list(rows[0].times), list(rows[0].ratios)
    gated = any(row.verdicts for row in rows)
    header = ["", *labels, *(f"ours / {label}" for label in compared), *(["promised"] if gated else [])]
    table = [header]
    for row in rows:
        line = [row.name, *(quantity(row.times[label].median, row.unit) for label in labels)]
        for label in compared:
            spread = row.ratios.get(label)
            text = ratio(spread) if spread else "-"
            line.append(f"{mark}{text}{mark}" if loses(row, label) else text)
        if gated:
            verdicts = (
                verdict.promise if verdict.kept else f"{mark}{verdict.promise}{mark}"
                for verdict in row.verdicts
            )
            line.append("; ".join(verdicts))
        table.append(line)
    return table


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Format cells as a Markdown table, with text aligned left and numbers aligned right."""
    header, *rows = table
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def with_note(text: str) -> str:
    """Add a note below a table if some rows of the table measure a feature that was removed."""
    return f"{text}\n\n{OLD_WAY_NOTE}" if f", {OLD_WAY}" in text else text


def caption(report: Report, record: SectionRecord) -> str:
    """Return a sentence that says how, when and on which machine a section was measured."""
    count = f"{record.threads} thread{'' if record.threads == 1 else 's'}"
    rounds = sorted({outcome.rounds for outcome in record.outcomes})
    span = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    figure = "comes from one round" if span == "1" else f"is the median of {span} rounds"
    taken = f"measured on {record.date} with torch {report.torch} and {count}"
    machine = f"{report.machine} ({report.details})"
    return f"*Each figure {figure} ({record.timing}), {taken}. Machine: {machine}.*"


def section(report: Report, key: str, figures: Sequence[str] = ()) -> str:
    """Return all tables and plots of a section as Markdown, with a caption that describes the machine."""
    record = report.sections[key]
    parts = []
    for name, rows in grouped(record.outcomes).items():
        parts += [f"**{name}**", markdown(cells(rows))]
    return with_note("\n\n".join([*parts, *figures, caption(report, record)]))


def losses(report: Report) -> str:
    """List every comparison in which amp_plugin is slower than torch or the framework's own plugin."""
    rows = [["", "against", "ours / theirs"]]
    for record in report.sections.values():
        for outcome in record.outcomes:
            rows += [
                [f"{outcome.table}: {outcome.name}", label, ratio(spread)]
                for label, spread in outcome.ratios.items()
                if loses(outcome, label)
            ]
    if len(rows) == 1:
        return "None in this run."
    return markdown(rows)


def missed(report: Report) -> str:
    """List all promised limits that amp_plugin missed, including limits relative to a memory copy."""
    rows = [["", "against", "ours / theirs", "promised"]]
    for record in report.sections.values():
        for outcome in record.outcomes:
            for verdict in (verdict for verdict in outcome.verdicts if not verdict.kept):
                spread = outcome.ratios.get(verdict.against)
                compared = ratio(spread) if spread else quantity(verdict.value, outcome.unit)
                rows.append([f"{outcome.table}: {outcome.name}", verdict.against, compared, verdict.promise])
    return with_note(markdown(rows)) if len(rows) > 1 else "None in this run."


def parts(report: Report) -> str:
    """List the checks in a GPU run that are not benchmarks, with their results."""
    rows = [["", "outcome", "seconds"]]
    rows += [
        [part["name"], part["verdict"].replace("|", "/"), f"{part['seconds']:.0f}"] for part in report.parts
    ]
    return markdown(rows) if report.parts else "Not kept of this run."


def summary(report: Report, most: int = 10) -> str:
    """List up to ``most`` comparisons with torch or a stock plugin that have a limit in the documentation.

    The first comparison of each section is chosen, then the second of each section, and so on. The chosen
    comparisons are listed in the order of the report.
    """
    ranked = [
        (rank, place, row)
        for place, record in enumerate(report.sections.values())
        for rank, row in enumerate(_promised(record))
    ]
    chosen = sorted(ranked, key=lambda entry: entry[:2])[:most]
    rows = [row for _, _, row in sorted(chosen, key=lambda entry: (entry[1], entry[0]))]
    return with_note(markdown([["", "against", "ours / theirs", "promised"], *rows]))


def _promised(record: SectionRecord) -> list[list[str]]:
    """Return a row for each comparison that has a limit in the documentation. Missed limits are bold."""
    rows = []
    for outcome in record.outcomes:
        for rival in (label for label in outcome.ratios if label in RIVALS):
            verdict = next((verdict for verdict in outcome.verdicts if verdict.against == rival), None)
            if verdict is not None:
                promise = verdict.promise if verdict.kept else f"**{verdict.promise}**"
                name = f"{outcome.table}: {outcome.name}"
                rows.append([name, rival, ratio(outcome.ratios[rival]), promise])
    return rows


def published(report: Report) -> str:
    """List published clipping times next to ours, each relative to torch on the same machine."""
    here = {
        outcome.x: outcome for outcome in report.sections["tensors"].outcomes if "in place" in outcome.table
    }
    header = [
        "tensors of 1 KB",
        "torch, loop",
        "torch, foreach",
        "apex",
        "apex / foreach",
        "ours / foreach, here",
    ]
    rows = [
        [
            f"{clipping.tensors}",
            *(quantity(value, "us") for value in (clipping.loop, clipping.foreach, clipping.apex)),
            f"{clipping.apex / clipping.foreach:.2f}",
            ratio(here[clipping.tensors].ratios["torch"]),
        ]
        for clipping in CLIPPING
        if clipping.tensors in here
    ]
    note = (
        f"The times were published in {CLIPPING_SOURCE}, for clipping alone on a GPU. The last column was "
        "measured on our machine, and includes unscaling and the overflow check for both libraries."
    )
    return "\n\n".join([markdown([header, *rows]), note, DEEPSPEED])
