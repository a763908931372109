"""Run `amp-plugin` in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from amp_plugin.cli import app


def amp(*words: object, columns: int = 300) -> Any:
    """Return the result of a command line, its output without colours and as wide as wanted."""
    environment = {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    return CliRunner().invoke(app, [*map(str, words)], env=environment)


def diagnose(*words: object) -> Any:
    """Return the result of ``amp-plugin diagnose``."""
    return amp("diagnose", *words)
