"""Compare amp_plugin with torch, save the figures, and write them into the documentation.

``python -m benchmarks`` measures all sections on the CPU, and writes results/ and the figures in docs/.
``python -m benchmarks cuda`` measures all sections on a GPU.
``python -m benchmarks --only ops clipping`` measures two sections, and keeps the saved figures of all others.
``python -m benchmarks --check`` runs only comparisons with a limit in the documentation, and writes no file.
With ``--check``, the exit code is 1 if a result misses its limit in the documentation by more than 10 %.
``python -m benchmarks --keep`` measures and saves figures, but does not change the documentation.
``python -m benchmarks --draw`` writes the figures saved for this machine into the documentation.
``python -m benchmarks cuda --draw --figures FILE`` writes figures measured elsewhere into the documentation.
``python -m benchmarks cuda --promises --figures FILE`` shows which results meet their limits.
With ``--promises``, the exit code is 1 if a result misses its limit in the documentation by more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.kernels.build import require_native
from benchmarks import tables
from benchmarks.catalogue import keys, section
from benchmarks.document import LAB, blocks, filled, read_pages
from benchmarks.harness import Outcome, measure
from benchmarks.report import Report, SectionRecord, today
from benchmarks.setting import Section, Setting, threads

CONSOLE = Console(width=160)


def run(section: Section, setting: Setting, *, gated: bool = False) -> SectionRecord:
    """Measure a section. If ``gated``, measure only comparisons whose result must stay below a limit."""
    begin = time.perf_counter()
    with threads(section.threads), older_objects_frozen():
        outcomes = [
            measure(comparison)
            for comparison in section.comparisons(setting)
            if comparison.gates or not gated
        ]
        return SectionRecord(
            date=today(),
            seconds=time.perf_counter() - begin,
            threads=torch.get_num_threads(),
            timing=section.timing if setting.device == "cpu" else "wall or device time",
            plots=section.plots,
            outcomes=tuple(outcomes),
        )


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection between comparisons is fast."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def show(record: SectionRecord) -> None:
    """Print the tables of a section."""
    for name, rows in tables.grouped(record.outcomes).items():
        header, *lines = tables.cells(rows, mark="")
        table = Table(title=name, title_justify="left")
        for place, column in enumerate(header):
            table.add_column(column, justify="right" if place else "left")
        for line in lines:
            table.add_row(*line)
        CONSOLE.print(table)
    CONSOLE.print(f"{record.seconds:.0f} s\n")


def write(report: Report) -> None:
    """Write the documentation from a report."""
    from benchmarks.plots import draw  # noqa: PLC0415 - matplotlib is slow to import

    (LAB / "images").mkdir(exist_ok=True)
    for page, text in filled(read_pages(), blocks(report, draw(report, LAB / "images"))).items():
        page.write_text(text, encoding="utf-8")


def save(report: Report) -> None:
    """Save the figures as JSON, with the sections in the order of the report."""
    ordered = {key: report.sections[key] for key in keys(report.device) if key in report.sections}
    report.path.parent.mkdir(exist_ok=True)
    report.path.write_text(replace(report, sections=ordered).to_json(), encoding="utf-8")


def kept_report(device: str) -> Report:
    """Return the saved report for this machine and torch version, or an empty report."""
    here = Report.here(device)
    return Report.from_json(here.path.read_text(encoding="utf-8")) if here.path.exists() else here


def figures(options: argparse.Namespace) -> Report:
    """Return the saved report that the command line selects. Exit if there is none."""
    if options.figures:
        return Report.from_json(options.figures.read_text(encoding="utf-8"))
    report = kept_report(options.device)
    if not report.sections:
        sys.exit(f"no figures to show: {report.path} is missing; run python -m benchmarks first")
    return report


def show_promises(report: Report) -> int:
    """Print whether each result meets the limit that the documentation promises.

    Return 1 if any result misses its limit by more than the tolerance, else 0.
    """
    outcomes = [outcome for record in report.sections.values() for outcome in record.outcomes]
    for outcome in outcomes:
        for verdict in outcome.verdicts:
            told = "kept" if verdict.kept else "just missed" if verdict.holds else "MISSED"
            CONSOLE.print(f"{told:<11}  {outcome.table}: {outcome.name}: {verdict.text}", markup=False)
    return int(bool(missed(outcomes)))


def missed(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line of text for each result that misses its promised limit by more than the tolerance."""
    return [
        f"{outcome.table}: {outcome.name}: {verdict.text}"
        for outcome in outcomes
        for verdict in outcome.verdicts
        if not verdict.holds
    ]


def arguments(device: str, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. ``--only`` accepts the sections that exist for ``device``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=keys(device),
        default=keys(device),
        metavar="SECTION",
        help=f"of {', '.join(keys(device))}",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="measure what is promised, write nothing")
    what.add_argument("--keep", action="store_true", help="measure, keep the figures, write no page")
    what.add_argument("--draw", action="store_true", help="measure nothing, write the documentation")
    what.add_argument("--promises", action="store_true", help="measure nothing, show what was promised")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that a section runs")
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="for --draw and --promises: not this machine's figures"
    )
    asked = parser.parse_args(words)
    if asked.figures and not (asked.draw or asked.promises):
        parser.error("--figures goes with --draw or --promises, which measure nothing")
    return asked


def prepare(device: str) -> None:
    """Load the kernels. If loading the kernels fails, print the reason and exit."""
    try:
        require_native("the benchmarks")
        if device == "cuda":
            from benchmarks.cuda import prepare as prepare_cuda  # noqa: PLC0415 - only for a GPU

            prepare_cuda()
    except (RuntimeError, ArithmeticError) as error:
        sys.exit(str(error))
    KERNELS.install()


def main(words: Sequence[str] | None = None) -> int:
    """Measure, save figures and write the documentation. Return 1 if a promised limit was missed."""
    device = "cuda" if "cuda" in (sys.argv[1:] if words is None else words) else "cpu"
    options = arguments(device, words)
    if options.draw or options.promises:
        report = figures(options)
        if options.promises:
            return show_promises(report)
        write(report)
        return 0
    prepare(options.device)
    report = kept_report(options.device)
    outcomes: list[Outcome] = []
    for key in sorted(options.only, key=keys(options.device).index):
        record = run(section(key), Setting(device=options.device, tiny=options.tiny), gated=options.check)
        show(record)
        outcomes += record.outcomes
        report.sections[key] = record
        if not options.check:
            save(report)
    for text in (found := missed(outcomes)):
        CONSOLE.print(f"missed: {text}")
    if options.check:
        return int(bool(found))
    if not options.keep:
        write(kept_report(options.device))  # write the saved, rounded figures
    return 0


if __name__ == "__main__":
    sys.exit(main())
