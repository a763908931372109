"""Save the figures of a GPU run in results/, and write them as tables and plots into the documentation.

Run ``python -m benchmarks.published gpu.json``. The file gpu.json is written by ``python -m tests.on_gpu
--results FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import save, write
from benchmarks.report import Report


def publish(file: Path) -> Report:
    """Save the results of a GPU run, and write them into the documentation as tables and plots.

    Args:
        file: A JSON file with the benchmark report of a GPU run and the results of the other GPU checks.

    Raises:
        ValueError: The file contains no measured figure.
    """
    text = file.read_text(encoding="utf-8")
    if not json.loads(text).get("sections"):
        msg = f"{file} holds no figures: no section of the benchmarks has run to its end"
        raise ValueError(msg)
    report = Report.from_json(text)
    save(report)
    write(report)
    return report


def main(words: Sequence[str] | None = None) -> int:
    """Publish the figures of one file. Return 1 if that fails."""
    asked = sys.argv[1:] if words is None else words
    if len(asked) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        report = publish(Path(asked[0]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{report.path}: {len(report.sections)} sections of {report.machine}, and the pages of docs/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
