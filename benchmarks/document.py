"""Write a benchmark report between markers in the documentation. Other text is not changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks import tables
from benchmarks.report import Report

LAB = Path(__file__).parents[1] / "docs" / "lab"
PAGES = tuple(LAB / name for name in ("performance.md", "measurements.md", "cuda.md"))


def blocks(report: Report, figures: Mapping[str, list[str]]) -> dict[str, str]:
    """Return a dict that maps the name of each marked block in the documentation to its new text.

    Args:
        report: The measurements.
        figures: The result of ``plots.draw``.
    """
    made = {key: tables.section(report, key, figures.get(key, [])) for key in report.sections}
    if report.device == "cuda":
        parts = [text for key in made for text in (f"### {key}", made[key])]
        return {
            "cuda": "\n\n".join(parts),
            "cuda overview": "\n\n".join(figures.get("overview", [])),
            "cuda summary": tables.summary(report),
            "cuda losses": tables.losses(report),
            "cuda missed": tables.missed(report),
            "cuda parts": tables.parts(report),
        }
    made["summary"] = tables.summary(report)
    made["losses"] = tables.losses(report)
    if "overview" in figures:
        made["overview"] = "\n\n".join(figures["overview"])
    if "tensors" in report.sections:
        made["published"] = tables.published(report)
    return {f"cpu {key}": text for key, text in made.items()}


def read_pages() -> dict[Path, str]:
    """Return the text of each documentation page that shows benchmark figures."""
    return {page: page.read_text(encoding="utf-8") for page in PAGES}


def filled(pages: Mapping[Path, str], blocks: Mapping[str, str]) -> dict[Path, str]:
    """Return the documentation pages, with each block inserted between its begin and end markers.

    Raises:
        ValueError: No documentation page contains the markers of a block.
    """
    texts = dict(pages)
    for key, block in blocks.items():
        begin, end = f"<!-- begin {key} -->", f"<!-- end {key} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        places = [page for page, text in texts.items() if pattern.search(text)]
        if not places:
            msg = f"no page has a place for the figures of {key!r}; add the lines {begin} and {end} to one"
            raise ValueError(msg)
        for page in places:
            texts[page] = pattern.sub(lambda _, whole=f"{begin}\n{block}\n\n{end}": whole, texts[page])
    return texts
