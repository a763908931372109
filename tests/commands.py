"""Runs `amp-plugin` in this process, and other commands as if the package were installed."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from amp_plugin.cli import app
from amp_plugin.program import main_restored
from tests.adapters.commands import run_unedited

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def amp(*words: object, columns: int = 300) -> Any:
    """Return the result of a command line. Its output has no colors and the given width.

    ``run`` and ``report`` change their process, so they run in a process of their own.
    """
    environment = {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    command, *others = map(str, words)
    if command in {"run", "report"}:
        done = run_unedited(
            *others, command=command, environment=environment, folder=Path.cwd(), frameworks=True
        )
        outcome = {"exit_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return SimpleNamespace(**outcome, output=done.stdout + done.stderr)
    with main_restored():
        return CliRunner().invoke(app, [command, *others], env=environment)


def diagnose(*words: object) -> Any:
    """Return the result of ``amp-plugin diagnose``."""
    return amp("diagnose", *words)


def with_entry_points(folder: Path) -> dict[str, str]:
    """Return an environment in which the entry points of pyproject.toml exist, as pip would install them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "site" / "amp_plugin_entries-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amp_plugin_entries\nVersion: 0\n")
    entries = project["entry-points"]["torch.backends"].items()
    lines = "".join(f"{name} = {value}\n" for name, value in entries)
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(info.parent), str(ROOT)])}
