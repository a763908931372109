"""Put a report into docs/performance.md: between markers, so that the prose around stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks import tables
from benchmarks.report import Report

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"


def blocks(report: Report, figures: Mapping[str, list[str]]) -> dict[str, str]:
    """Return marker -> what stands between it and its end.

    Args:
        report: What was measured.
        figures: What ``plots.draw`` returned.
    """
    made = {key: tables.section(report, key, figures.get(key, [])) for key in report.sections}
    if report.device == "cuda":
        parts = [text for key in made for text in (f"### {key}", made[key])]
        return {"cuda": "\n\n".join([*figures.get("overview", []), *parts])}
    made["summary"] = tables.summary(report)
    made["losses"] = tables.losses(report)
    if "overview" in figures:
        made["overview"] = "\n\n".join(figures["overview"])
    if "tensors" in report.sections:
        made["published"] = tables.published(report)
    return {f"cpu {key}": text for key, text in made.items()}


def filled(text: str, blocks: Mapping[str, str]) -> str:
    """Return the page with each block between its markers.

    Raises:
        ValueError: A block has no markers.
    """
    for key, block in blocks.items():
        begin, end = f"<!-- begin {key} -->", f"<!-- end {key} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            msg = f"the page has no place for the figures of {key!r}; add the lines {begin} and {end} to it"
            raise ValueError(msg)
        text = pattern.sub(lambda _, whole=f"{begin}\n{block}\n{end}": whole, text)
    return text
