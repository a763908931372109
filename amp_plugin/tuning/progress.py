"""A progress bar for a search whose length is not known beforehand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from amp_plugin.tuning.search import Tried


class ShownProgress:
    """Says what runs and how many rule sets have been tried.

    Args:
        progress: the bar.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("tuning", total=None, tried=0)
        self._tried = 0

    def say(self, what: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=what)

    def tried(self, attempt: Tried) -> None:
        """Count a set of rules that was tried."""
        self._tried += 1
        names = ", ".join(
            f"{change.op.removeprefix('aten::')}: {change.rule.value}" for change in attempt.changes
        )
        self._progress.update(
            self._task, advance=1, tried=self._tried, description=names or "the default rules"
        )


@contextmanager
def shown_progress(*, enabled: bool) -> Iterator[ShownProgress]:
    """Show a bar on standard error while the block runs.

    Args:
        enabled: False shows nothing.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[tried]} sets of rules tried"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=Console(file=sys.stderr), disable=not enabled, transient=True
    ) as progress:
        yield ShownProgress(progress)
