"""Formats a report of mistakes as text, as GitHub's workflow commands, or as SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from amp_plugin.check.checker import Found, Report
from amp_plugin.mistakes import MISTAKES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(report: Report) -> str:
    """Return a string with a line for each mistake, and a last line with the counts."""
    lines = [f"{_place(one)}: {one.code} {one.text}" for one in report.found]
    lines += [f"{path}: cannot be checked: {reason}" for path, reason in report.faults.items()]
    number = report.files - len(report.faults)
    files = f"{number} file{'' if number == 1 else 's'}"
    count = report.written or (f"{len(report.found)} found" if report.found else "nothing found")
    fixed = f", {report.fixed} fixed" if report.fixed else ""
    mendable = sum(bool(one.hit.edits) for one in report.found)
    hint = f"; --fix mends {mendable}" if mendable else ""
    faults = f"; {len(report.faults)} cannot be checked" if report.faults else ""
    return "\n".join([*lines, f"{files} checked, {count}{fixed}{hint}{faults}"])


def _place(one: Found) -> str:
    cell = f"cell {one.cell}:" if one.cell else ""
    return f"{one.path}:{cell}{one.line}:{one.column}"


def as_github(report: Report) -> str:
    """Return GitHub's workflow commands, which annotate the lines of a pull request."""
    lines = []
    for one in report.found:
        level = "warning" if one.mistake.is_harmless else "error"
        place = f"file={_property(one.path.as_posix())}"
        if not one.cell:
            place += f",line={one.line},col={one.column},endLine={one.end_line},endColumn={one.end_column}"
        text = f"cell {one.cell}, line {one.line}: {one.text}" if one.cell else one.text
        lines.append(f"::{level} {place},title={one.code} {one.mistake.name}::{_data(text)}")
    for path, reason in report.faults.items():
        lines.append(f"::error file={_property(path.as_posix())}::{_data(f'cannot be checked: {reason}')}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(report: Report, version: str) -> str:
    """Return a SARIF log with one run.

    Args:
        report: the report to format.
        version: the version of this package.
    """
    rules = [
        {
            "id": code,
            "name": mistake.name,
            "shortDescription": {"text": mistake.what},
            "help": {"text": mistake.instead},
            "defaultConfiguration": {"level": "warning" if mistake.is_harmless else "error"},
        }
        for code, mistake in MISTAKES.items()
    ]
    notes = [
        {"level": "error", "message": {"text": reason}, "locations": [_location(path.as_posix())]}
        for path, reason in report.faults.items()
    ]
    run = {
        "tool": {"driver": {"name": "amp-plugin", "version": version, "rules": rules}},
        "invocations": [{"executionSuccessful": not report.faults, "toolExecutionNotifications": notes}],
        "results": [_result(one) for one in report.found],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _result(one: Found) -> dict[str, Any]:
    region = None
    # Line numbers in a notebook's cells are not line numbers of the file.
    if not one.cell:
        region = {
            "startLine": one.line,
            "startColumn": one.column,
            "endLine": one.end_line,
            "endColumn": one.end_column,
        }
    text = f"cell {one.cell}, line {one.line}: {one.text}" if one.cell else one.text
    return {
        "ruleId": one.code,
        "ruleIndex": list(MISTAKES).index(one.code),
        "level": "warning" if one.mistake.is_harmless else "error",
        "message": {"text": text},
        "locations": [_location(one.path.as_posix(), region)],
        "partialFingerprints": {
            "ampPlugin/v1": hashlib.sha256("\n".join(one.known_by).encode()).hexdigest()[:16]
        },
    }


def _location(path: str, region: dict[str, int] | None = None) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": path}}
    if region is not None:
        physical["region"] = region
    return {"physicalLocation": physical}
